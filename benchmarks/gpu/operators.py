"""Time of each operator at the sizes of the large models, beside plain torch and the device's limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.cases import Run, case
from benchmarks.gpu.device_time import busy_seconds, passed_seconds
from benchmarks.gpu.worst_cases import WorstCases
from benchmarks.operators.calls import TINY, Call, Calls, Sizes
from megatron_ext.mcore import platform
from megatron_ext.ops.backends import preferring

ENOUGH = 0.05  # seconds for which calls are repeated, at least
FEWEST, MOST = 3, 200  # calls


Makers = dict[str, Callable[[], Call]]
"""Makers of calls by name."""


@case("gpu", reserved=60.0, needs_cuda=True)
def operators(run: Run) -> None:
    """Time on the device and of a call, plain torch's time, and TB/s or TFLOP/s of each operator."""
    dtype, sizes = (torch.float32, TINY) if run.is_quick else (torch.bfloat16, Sizes())
    mild, worst = planned_calls(sizes, dtype, platform.device(), is_quick=run.is_quick)
    for like, calls in (("kernel", mild), ("worst case", worst)):
        for name, make in calls.items():
            run.attempt(name, partial(_kernel, run, name, make), like=like)
    for name, make in mild.items():
        run.attempt(f"{name}, by plain torch", partial(_reference, run, name, make), like="plain")


def planned_calls(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, *, is_quick: bool = False
) -> tuple[Makers, Makers]:
    """Return calls with a reference, and calls of attention, sampling and experts at their worst shapes without one."""
    mild = Calls(sizes, dtype, device).all()
    kept = {name: make for name, make in mild.items() if not name.startswith(("attention", "tokens", "best"))}
    return kept, WorstCases(dtype, device, is_quick=is_quick).all()


@torch.inference_mode()
def _kernel(run: Run, name: str, make: Callable[[], Call]) -> None:
    call = make()
    taken, called = seconds_of(call.work)
    rate = call.amount / taken / 1e12
    run.row(name, {"us": 1e6 * taken, "us a call": 1e6 * called, f"{call.unit}/s": rate})


@torch.inference_mode()
def _reference(run: Run, name: str, make: Callable[[], Call]) -> None:
    call = make()
    if call.has_reference:
        with preferring("reference"):
            run.row(name, {"plain torch us": 1e6 * seconds_of(call.work)[0]})


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Return two times of one call: seconds of device work, and wall seconds in a sequence of calls.

    Without a profiler, as on a CPU, the second is both.
    """
    work()
    times = min(MOST, max(FEWEST, int(ENOUGH / passed_seconds(work))))
    called, busy = passed_seconds(work, times) / times, busy_seconds(work, times) / times
    return (busy if busy == busy else called), called
