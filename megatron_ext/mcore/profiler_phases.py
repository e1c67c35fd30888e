"""Profiler phases: named ranges of an engine's steps, present only while profiling."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial

from torch.profiler import record_function

from megatron_ext.mcore import controller
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.memory.step_states import StepStates

Function = Callable[..., object]

# In order of a step.
PHASES = ("plan", "restore", "stage", "forward", "sample", "commit", "output")


@contextlib.contextmanager
def named_phases(
    engine: InferenceEngine, before_step: Callable[[], None], before_close: Callable[[], object]
) -> Iterator[None]:
    """Name the phases of every step of this engine, until the block ends or the engine is reset.

    Args:
        engine: Engine of a single rank.
        before_step: Called in the engine's thread before each step.
        before_close: Called in the engine's thread before the engine is closed.
    """
    scheduler, context = engine.core.scheduler, engine.context
    places: tuple[tuple[str, object, str], ...] = (
        ("plan", scheduler, "schedule"),
        ("restore", StepStates, "restore"),
        ("stage", context, "stage"),
        ("forward", engine.controller, "forward"),
        ("sample", controller, "sample_and_score"),
        ("commit", scheduler, "commit"),
        ("output", engine.core, "report"),
    )
    assert tuple(name for name, _, _ in places) == PHASES, places
    with contextlib.ExitStack() as stack:
        for name, owner, attribute in places:
            stack.enter_context(_replaced(owner, attribute, partial(_named, name)))
        stack.enter_context(_replaced(engine.core, "compute", partial(_after, before_step)))
        stack.enter_context(_replaced(engine.core, "close", partial(_after, before_close)))
        yield


def _named(name: str, function: Function) -> Function:
    @functools.wraps(function)
    def named(*arguments: object, **options: object) -> object:
        with record_function(name):
            return function(*arguments, **options)

    return named


def _after(first: Callable[[], object], function: Function) -> Function:
    @functools.wraps(function)
    def after() -> object:
        first()
        return function()

    return after


@contextlib.contextmanager
def _replaced(owner: object, attribute: str, change: Callable[[Function], Function]) -> Iterator[None]:
    """Replace a method, or a module's function, by its change inside this context."""
    function: Function = getattr(owner, attribute)
    was_own = attribute in vars(owner)
    setattr(owner, attribute, change(function))
    try:
        yield
    finally:
        if was_own:
            setattr(owner, attribute, function)
        else:
            delattr(owner, attribute)
