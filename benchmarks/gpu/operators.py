"""Time of each operator at the sizes of the large models, beside plain torch and the device's limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.cases import Run, case
from benchmarks.gpu.device_time import busy_seconds, passed_seconds
from benchmarks.operators.calls import TINY, Call, Calls, Sizes
from megatron_ext.mcore import platform
from megatron_ext.ops.backends import preferring

ENOUGH = 0.05  # seconds for which calls are repeated, at least
FEWEST, MOST = 3, 200  # calls


@case("gpu", reserved=40.0, needs_cuda=True)
def operators(run: Run) -> None:
    """Time on the device and of a call, plain torch's time, and TB/s or TFLOP/s of each operator."""
    dtype, sizes = (torch.float32, TINY) if run.is_quick else (torch.bfloat16, Sizes())
    made = Calls(sizes, dtype, platform.device()).all()
    for name, make in made.items():
        run.attempt(name, partial(_kernel, run, name, make), like="kernel")
    for name, make in made.items():
        run.attempt(f"{name}, by plain torch", partial(_reference, run, name, make), like="plain")


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
