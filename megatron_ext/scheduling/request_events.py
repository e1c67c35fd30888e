"""Lifecycle events of a request, with their times, and its timeline."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import TypeAlias


class EventType(enum.Enum):
    """Lifecycle events of a request (KV-10)."""

    ADD_ENGINE = enum.auto()
    ADD_CONTEXT = enum.auto()  # each admission, not each chunk
    FIRST_TOKEN = enum.auto()
    GENERATED_TOKEN = enum.auto()  # only if token events are tracked; the payload is the token id
    PAUSE = enum.auto()
    EVICT = enum.auto()  # preempted; the name is Megatron's
    FINISH = enum.auto()
    FAIL = enum.auto()
    ERROR_TRANSIENT = enum.auto()
    ERROR_NONTRANSIENT = enum.auto()


Payload: TypeAlias = str | dict[str, int] | None


@dataclass(frozen=True)
class Event:
    """Lifecycle event. `timestamp` is in seconds of a monotonic clock (not wall-clock time)."""

    type: EventType
    timestamp: float
    payload: Payload = None

    def to_dict(self) -> dict[str, object]:
        """Return the event as in the results."""
        return {"type": self.type.name, "timestamp": self.timestamp, "payload": self.payload}


class Timeline:
    """Timeline of a request from submission to its end.

    Attributes:
        events: Events in order; the first is the submission.
        arrival_wall_time: Seconds since the epoch.
        step_count: Engine steps that computed a chunk of the request.
        has_waited_for_prefix: True once the request has waited for another request's prefix and was counted.
        drafted: Draft tokens of the request that were verified.
        accepted: Draft tokens that were accepted.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.arrival_wall_time = time.time()
        self.step_count = 0
        self.has_waited_for_prefix = False
        self.drafted = self.accepted = 0
        self._end: float | None = None  # seconds of the events' clock
        self.note(EventType.ADD_ENGINE)

    def note(self, event_type: EventType, payload: Payload = None) -> None:
        """Add an event with the present time."""
        self.events.append(Event(event_type, time.monotonic(), payload))

    def close(self) -> None:
        """Set the end of the request to the present time."""
        self._end = time.monotonic()

    def take_back_finish(self) -> None:
        """Remove the FINISH event of a request whose outcome is revised before it was reported."""
        if self.events[-1].type is EventType.FINISH:
            self.events.pop()

    def take_back_tokens(self, count: int) -> None:
        """Remove the events of the last `count` generated tokens, which were dropped before they were reported."""
        noted = [i for i, event in enumerate(self.events) if event.type is EventType.GENERATED_TOKEN]
        for i in reversed(noted[len(noted) - count :]):
            del self.events[i]

    @property
    def latency(self) -> float:
        """Seconds from submission to the end of a request that has ended."""
        assert self._end is not None, "still alive"
        return self._end - self.events[0].timestamp

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token; None if there is no token."""
        first = next((event for event in self.events if event.type is EventType.FIRST_TOKEN), None)
        return None if first is None else first.timestamp - self.events[0].timestamp
