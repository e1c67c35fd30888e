"""Host time of a step by phase: plan, description, writing, launch, waiting, commit, report."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from megatron_ext.engine import async_scheduling as ahead_module
from megatron_ext.engine import replica as replica_module
from megatron_ext.engine.core import EngineCore
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.runner.cuda_graphs.input_buffers import PendingOutput
from megatron_ext.scheduling.async_planning import AsyncPlanner
from megatron_ext.scheduling.scheduler import Scheduler

WHOLE = "step"
# Calls that are timed: a place, and the name of the call there. Time within an inner one is not its outer one's.
PLACES: dict[str, tuple[object, str]] = {
    WHOLE: (EngineCore, "step"),
    "plan": (Scheduler, "schedule"),
    "plan_next": (AsyncPlanner, "plan_next"),  # in the place of a plan, where a step is launched ahead of tokens
    "describe": (replica_module, "describe_step"),
    "describe ahead": (ahead_module, "describe_ahead"),
    "write and send": (CudaGraphRunner, "_send"),
    "launch": (CudaGraphRunner, "launch"),
    "wait": (PendingOutput, "read"),
    "commit": (Scheduler, "commit"),
    "report": (EngineCore, "report"),
}


def phases_of(step: Callable[[], object], times: int) -> dict[str, float]:
    """Milliseconds of a step in each phase, on average; what is in no other phase is "the rest of the step".

    Args:
        step: A bound method, looked up again while its calls are timed.
        times: Steps.
    """
    with ExitStack() as stack:
        timer = Timer()
        there = {name: place for name, place in PLACES.items() if hasattr(*place)}
        for name, (owner, attribute) in there.items():
            stack.enter_context(timer.timing(owner, attribute, name))
        bound = getattr(step, "__self__", None)
        for _ in range(times):
            (step if bound is None else getattr(bound, step.__name__))()
    rows = {f"{name} ms": 1e3 * timer.own[name] / times for name in PLACES if name != WHOLE and timer.own[name]}
    return rows | {"the rest of the step ms": 1e3 * timer.own[WHOLE] / times}


class Timer:
    """Seconds of calls, without those of timed calls within them.

    Attributes:
        own: Seconds by name.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.own: defaultdict[str, float] = defaultdict(float)
        self._now, self._inner = now, [0.0]

    @contextmanager
    def timing(self, owner: object, attribute: str, name: str) -> Iterator[None]:
        """Within it calls of a function, or of a class's method, are timed."""
        function: Callable[..., object] = getattr(owner, attribute)

        def timed(*arguments: object, **options: object) -> object:
            start = self._now()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                passed = self._now() - start
                self.own[name] += passed - self._inner.pop()
                self._inner[-1] += passed

        with mock.patch.object(owner, attribute, timed):
            yield
