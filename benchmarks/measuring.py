"""Measuring: calls that take turns, percentiles, time of phases, and the machine's rate of matrix products."""

from __future__ import annotations

import math
import mmap
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar
from unittest import mock

import torch

from megatron_ext.ops.linear import onednn

Name = TypeVar("Name", bound=Hashable)
Clock = Callable[[], float]


def synchronize() -> None:
    """Wait for the CUDA device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def own_time() -> float:
    """Return seconds: wall, or CPU time of this thread if torch has no other, which other processes disturb less."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return the seconds of one call, device work included."""
    start = clock()
    work()
    synchronize()
    return clock() - start


def turns(
    works: Mapping[Name, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[Name, list[float]]:
    """Return the seconds of each work in `rounds` rounds; the works take turns, and a round before warms up."""
    times: dict[Name, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            taken = timed(work, clock)
            if number:
                times[name].append(taken)
    return times


def medians(
    works: Mapping[Name, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[Name, float]:
    """Return the median seconds of each work; see `turns`."""
    return {name: statistics.median(taken) for name, taken in turns(works, rounds, clock).items()}


def fastest(works: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, float]:
    """Return the seconds of the fastest call of each work, by `own_time`; see `turns`."""
    return {name: min(taken) for name, taken in turns(works, rounds, own_time).items()}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that `percent` of the values do not exceed (nearest rank); None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def matmul_rate(dtype: torch.dtype, device: torch.device, size: int = 1024) -> float:
    """Return the operations a second of a square matrix product, measured now."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / medians({"product": lambda: left @ right}, 9)["product"]


def packed_matmul_rate(size: int = 1024) -> float | None:
    """Return the rate of the same product, with a weight that oneDNN has packed; None where torch cannot pack."""
    if onednn.problem() is not None:
        return None
    weight, x = onednn.OneDnnWeight(torch.randn(size, size)), torch.randn(size, size)
    with torch.inference_mode():
        return 2 * size**3 / medians({"product": lambda: weight(x)}, 9)["product"]


def read_rate(size: int) -> float:
    """Return the rate, in bytes a second, at which the fastest reader reads `size` bytes again and again.

    Pages are large where the system has such, since looking up small ones costs a fourth of the rate.

    Args:
        size: Bytes that are read, a multiple of 4,096; as many as the caches hold are read from there.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory would have small pages
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    values, vector = torch.frombuffer(memory, dtype=torch.float32).fill_(1), torch.ones(1024)
    matrix = values.view(-1, 1024)
    times = medians({"sum": values.sum, "product": lambda: matrix @ vector}, 5)
    return size / min(times.values())


class Phases:
    """Seconds of calls by phase; timed calls within a call count in their own phase only.

    Args:
        clock: Clock, in seconds.

    Attributes:
        own: Seconds by phase.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.own: defaultdict[str, float] = defaultdict(float)
        self._clock, self._inner = clock, [0.0]

    @contextmanager
    def timing(self, places: Mapping[str, tuple[object, str]]) -> Iterator[Phases]:
        """Time calls of functions, or of methods of classes, inside this context.

        Args:
            places: Owner and attribute of each phase's function.
        """
        with ExitStack() as stack:
            for name, (owner, attribute) in places.items():
                stack.enter_context(mock.patch.object(owner, attribute, self._timed(getattr(owner, attribute), name)))
            yield self

    def _timed(self, function: Callable[..., object], name: str) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            start = self._clock()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                passed = self._clock() - start
                self.own[name] += passed - self._inner.pop()
                self._inner[-1] += passed

        return call

    def per_step(self, steps: int) -> dict[str, float]:
        """Return milliseconds a step of each phase, and forget them."""
        found = {name: 1e3 * seconds / steps for name, seconds in self.own.items()}
        self.own.clear()
        return found
