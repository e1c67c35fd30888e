"""When what happened to a request."""

from __future__ import annotations

import time

from megatron_ext.scheduling.request_events import Event, EventType, Payload


class Timeline:
    """From submission to the end.

    Attributes:
        events: In order; the first is the submission.
        arrival_wall_time: Seconds since the epoch.
        step_count: Engine steps that computed something for it.
        has_waited_for_prefix: It has waited for another request's prefix, and was counted.
        drafted: Drafts of it that steps have verified.
        accepted: Those of them that came.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.arrival_wall_time = time.time()
        self.step_count = 0
        self.has_waited_for_prefix = False
        self.drafted = self.accepted = 0
        self._end: float | None = None  # seconds, of the events' clock
        self.note(EventType.ADD_ENGINE)

    def note(self, event_type: EventType, payload: Payload = None) -> None:
        """Something happens now."""
        self.events.append(Event.now(event_type, payload))

    def close(self) -> None:
        """It ends now."""
        self._end = time.monotonic()

    def take_back_finish(self) -> None:
        """Nobody has been told that it finished, and it ends otherwise."""
        if self.events[-1].type is EventType.FINISH:
            self.events.pop()

    def take_back_tokens(self, count: int) -> None:
        """Nobody has been told of the last `count` generated tokens, and they did not come."""
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
        """Seconds from submission to the first token; None if none has come."""
        first = next((event for event in self.events if event.type is EventType.FIRST_TOKEN), None)
        return None if first is None else first.timestamp - self.events[0].timestamp
