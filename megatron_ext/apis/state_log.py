"""States of an engine and their changes; the first rank writes them into the store of torch.distributed."""

from __future__ import annotations

import enum
import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from megatron_ext.api.engine import LoadedEngine

Value = TypeVar("Value")

_LOOK_AGAIN = 0.02  # seconds between two looks: a blocking read would lock the store for all threads
_numbers = itertools.count()  # of the logs of this process; equal on all ranks, which make them together


class State(enum.Enum):
    """Stable states of Megatron's engine."""

    RUNNING = enum.auto()
    PAUSED = enum.auto()
    SUSPENDED = enum.auto()
    STOPPED = enum.auto()


@dataclass(frozen=True)
class Change:
    """Change of an engine's state, which does nothing unless the engine is in the state before it.

    Attributes:
        call: Method of the engine.
        refused: State in which the change is an error.
        problem: Message of that error.
    """

    before: State
    after: State
    call: Callable[[LoadedEngine], object]
    refused: State | None = None
    problem: str = ""


PAUSE = Change(State.RUNNING, State.PAUSED, LoadedEngine.pause_generation)
UNPAUSE = Change(
    State.PAUSED,
    State.RUNNING,
    LoadedEngine.resume_generation,
    State.SUSPENDED,
    "the engine is suspended; call resume() before unpause()",
)
SUSPEND = Change(
    State.PAUSED, State.SUSPENDED, LoadedEngine.suspend, State.RUNNING, "the engine runs; call pause() before suspend()"
)
RESUME = Change(State.SUSPENDED, State.PAUSED, LoadedEngine.resume)


class StateLog:
    """Log of an engine's states and of facts about it; all ranks make it together.

    It outlives the connections between ranks, and does not disturb other communication: ranks that train may read it.
    """

    def __init__(self) -> None:
        group = dist.group.WORLD
        assert group is not None, "there are several ranks"
        self._store = dist.PrefixStore(f"megatron_ext/llm/{next(_numbers)}", group.get_group_store())
        self._written = 0

    def write(self, state: State) -> None:
        """Append a state; on the first rank."""
        self._store.set(f"state/{self._written}", state.name)
        self._written += 1

    def read(self, index: int) -> State | None:
        """Return a state by its number; None if it has not been written yet."""
        key = f"state/{index}"
        return State[self._store.get(key).decode()] if self._store.check([key]) else None

    def publish(self, facts: Mapping[str, int]) -> None:
        """Store facts about the engine for the other ranks."""
        self._store.set("facts", json.dumps(facts))

    def published(self) -> dict[str, int] | None:
        """Return the facts; None if they have not been stored yet."""
        return json.loads(self._store.get("facts")) if self._store.check(["facts"]) else None


class StateReader:
    """Reader of a log from its beginning, in one thread at a time."""

    def __init__(self, log: StateLog) -> None:
        self._log = log
        self._next = 0
        self.state = State.RUNNING

    def wait_next(self, is_over: Callable[[], bool]) -> State:
        """Wait for the next state, and return it; STOPPED if the engine is over."""
        found = wait_for(lambda: self._log.read(self._next), is_over)
        self._next += found is not None
        self.state = found or State.STOPPED
        return self.state


def wait_for(look: Callable[[], Value | None], is_over: Callable[[], bool]) -> Value | None:
    """Return what `look` finds as soon as it finds something; None if nothing can come any more."""
    while (found := look()) is None:
        if is_over():
            return look()
        time.sleep(_LOOK_AGAIN)
    return found
