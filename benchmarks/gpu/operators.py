"""Time of each operator at the sizes of the large models, next to plain torch and the device's limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.cases import TINY, Case, Extents, Maker
from benchmarks.gpu.device_time import busy_seconds, passed_seconds
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.work import Figures
from megatron_ext.ops.backends import preferring

REFERENCE = "reference"
ENOUGH = 0.05  # seconds that calls are repeated for; at least
FEWEST, MOST = 3, 200  # and at most so many calls


def measure(notes: Notes, device: torch.device, quick: bool) -> None:
    """Every operator, its kernel first."""
    dtype, extents = (torch.float32, TINY) if quick else (torch.bfloat16, Extents())
    made = Maker(extents, dtype, device).cases()
    for name, make in made.items():
        notes.attempt(name, partial(_kernel, name, make), like="kernel")
    for name, make in made.items():
        notes.attempt(f"{name}, by plain torch", partial(_reference, name, make), like="plain")


def row(name: str, column: str) -> str:
    """Name of a figure's row."""
    return f"{name}: {column}"


@torch.inference_mode()
def _kernel(name: str, make: Callable[[], Case]) -> Figures:
    case = make()
    taken, called = seconds_of(case.work)
    rate = case.amount / taken / 1e12
    return {row(name, "us"): 1e6 * taken, row(name, "us a call"): 1e6 * called, row(name, f"{case.unit}/s"): rate}


@torch.inference_mode()
def _reference(name: str, make: Callable[[], Case]) -> Figures:
    case = make()
    if not case.has_reference:
        return {}
    with preferring(REFERENCE):
        return {row(name, "plain torch us"): 1e6 * seconds_of(case.work)[0]}


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Return two times of one call: seconds of device work, and wall seconds per call in a sequence of calls.

    Without a profiler, as on a CPU, the first is the second.

    Without a profiler, as on a CPU, the second is both.
    """
    work()
    times = min(MOST, max(FEWEST, int(ENOUGH / passed_seconds(work))))
    many = partial(_repeat, work, times)
    called, busy = passed_seconds(many) / times, busy_seconds(many) / times
    return (busy if busy == busy else called), called


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()
