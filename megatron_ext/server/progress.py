"""What a living request has so far, and when it got it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request
from megatron_ext.server.errors import ApiError
from megatron_ext.server.sampling import Job


@dataclass(frozen=True)
class Progress:
    """What a living request has so far; the names are those of `RequestRecord`."""

    prompt_tokens: tuple[int, ...]
    generated_tokens: tuple[int, ...]
    generated_log_probs: tuple[float, ...]
    generated_top_n_log_probs: tuple[dict[int, float], ...]
    prompt_log_probs: tuple[float, ...]
    prompt_top_n_log_probs: tuple[dict[int, float], ...]

    @classmethod
    def of(cls, request: Request) -> Progress:
        """A copy, for another thread."""
        return cls(
            request.prompt_tokens,
            tuple(request.generated_tokens),
            tuple(request.output.generated_log_probs),
            tuple(request.output.generated_top_n),
            tuple(request.output.prompt_log_probs),
            tuple(request.output.prompt_top_n),
        )


@dataclass(eq=False)
class Ticket:
    """A request in the engine, as the event loop sees it.

    Only the latest progress is kept, so a client that reads slowly costs no memory.
    """

    request_id: int
    job: Job
    progress: Progress | None = None
    record: RequestRecord | None = None  # once it has ended
    error: ApiError | None = None  # once it was given up


class TokenClock:
    """When each request got its last token."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}  # request id -> tokens then, and seconds

    def gaps(self, counts: dict[int, int]) -> list[float]:
        """Seconds since the token before, of each request that got one that is not its first."""
        now = time.monotonic()
        found = []
        for request_id, count in counts.items():
            before, moment = self._last.get(request_id, (0, now))
            if count > before:
                self._last[request_id] = count, now
                if before:
                    found.append(now - moment)
        return found

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._last.pop(request_id, None)
