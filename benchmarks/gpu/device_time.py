"""Time that the device computes, by torch's profiler; without one there is only the time that passes."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.measuring import synchronize


def passed_seconds(work: Callable[[], object], times: int = 1) -> float:
    """Return the seconds of `times` calls, until the device has computed them."""
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize()
    return time.perf_counter() - start


def busy_seconds(work: Callable[[], object], times: int = 1) -> float:
    """Return the seconds in which the device computes and copies during `times` calls; NaN if they are unknown.

    Kernels of a stream do not overlap.
    """
    if not torch.cuda.is_available():
        return float("nan")
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            passed_seconds(work, times)
    except (AssertionError, RuntimeError) as error:  # what profilers that lack their library raise
        _warn(f"no profiler: {error}")
        return float("nan")
    found = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
    return found if found > 0 else float("nan")


def idle_share(work: Callable[[], object], times: int) -> float:
    """Return the share of the time (without a profiler) in which the device idles; NaN if it is unknown."""
    passed = passed_seconds(work, times)
    share = 1 - busy_seconds(work, times) / passed
    return max(0.0, share) if share == share else share


@functools.cache
def _warn(text: str) -> None:
    """Print a warning once."""
    print(text, file=sys.stderr)
