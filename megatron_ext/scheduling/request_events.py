"""Lifecycle events of a request, with their times."""

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

    @classmethod
    def now(cls, event_type: EventType, payload: Payload = None) -> Event:
        """Return an event with the present time."""
        return cls(event_type, time.monotonic(), payload)

    def to_dict(self) -> dict[str, object]:
        """Return the event as in the results."""
        return {"type": self.type.name, "timestamp": self.timestamp, "payload": self.payload}
