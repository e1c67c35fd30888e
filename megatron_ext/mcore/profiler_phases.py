"""Profiler phases: named ranges of an engine's steps, present only while profiling."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from torch.profiler import record_function

from megatron_ext.mcore import controller
from megatron_ext.mcore.adapter import InferenceEngine

# In order of a step. "restore" is inside "stage".
PHASES = ("plan", "stage", "restore", "forward", "sample", "commit", "output")


@contextlib.contextmanager
def named_phases(engine: InferenceEngine) -> Iterator[None]:
    """Name the phases of every step of this engine, until the block ends or the engine is reset.

    Args:
        engine: Engine of a single rank.
    """
    scheduler, context = engine.scheduler, engine.context
    places: tuple[tuple[str, object, str], ...] = (
        ("plan", scheduler, "schedule"),
        ("stage", context, "stage"),
        ("restore", context, "_restore_states"),
        ("forward", engine.controller, "forward"),
        ("sample", controller, "choose_tokens"),
        ("commit", scheduler, "commit"),
        ("output", engine.core, "report"),
    )
    assert tuple(name for name, _, _ in places) == PHASES, places
    with contextlib.ExitStack() as stack:
        for name, owner, attribute in places:
            stack.enter_context(_named(name, owner, attribute))
        yield


@contextlib.contextmanager
def _named(name: str, owner: object, attribute: str) -> Iterator[None]:
    """Record calls of a method, or of a module's function, under a name inside this context."""
    function: Callable[..., object] = getattr(owner, attribute)
    was_own = attribute in vars(owner)

    @functools.wraps(function)
    def named(*arguments: object, **options: object) -> object:
        with record_function(name):
            return function(*arguments, **options)

    setattr(owner, attribute, named)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, attribute, function)
        else:
            delattr(owner, attribute)
