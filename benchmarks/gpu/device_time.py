"""The time that the device computes, by torch's profiler; without one there is only the time that passes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.measuring import synchronize

_said: set[str] = set()


def passed_seconds(work: Callable[[], object]) -> float:
    """Until the device has done it."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def busy_seconds(work: Callable[[], object]) -> float:
    """Seconds in which the device computes and copies during `work`; NaN without a CUDA device.

    Kernels of a stream do not overlap.
    """
    if not torch.cuda.is_available():
        return float("nan")
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
            synchronize()
    except (AssertionError, RuntimeError) as error:  # what profilers that lack their library raise
        _say(f"no profiler: {error}")
        return float("nan")
    found = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
    return found if found > 0 else float("nan")


def idle_share(work: Callable[[], object]) -> float:
    """Share of the time (without a profiler) in which the device idles; NaN if the device time is unknown."""
    passed = passed_seconds(work)
    share = 1 - busy_seconds(work) / passed
    return max(0.0, share) if share == share else share


def _say(text: str) -> None:
    """Print the warning once."""
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr)
