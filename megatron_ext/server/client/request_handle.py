"""Request handle of the event loop, and the clock of its tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.updates import Progress, Update
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.openai.engine_requests import RequestSpec


@dataclass(eq=False)
class RequestHandle:
    """Request in the engine, as the event loop sees it.

    Attributes:
        request: The engine client's request.
        spec: Prompt and parameters.
        progress: Output so far, of a streamed request.
        record: Whole output, once the request has ended.
        error: Reason for a missing record, once the request was given up.
    """

    request: EngineRequest
    spec: RequestSpec
    progress: Progress | None = None
    record: RequestRecord | None = None
    error: ApiError | None = None

    def take(self, update: Update) -> None:
        """Append an update."""
        if self.progress is None:
            self.progress = Progress(update)
        self.progress.add(update)


class TokenClock:
    """Time of the last token of each request."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}  # request id -> tokens then, and seconds

    def gaps(self, counts: dict[int, int]) -> list[float]:
        """Return the seconds since the previous token, for each token that is not its request's first.

        Tokens that arrive together share the time equally.
        """
        now = time.monotonic()
        found = []
        for request_id, count in counts.items():
            before, moment = self._last.get(request_id, (0, now))
            if count > before:
                self._last[request_id] = count, now
                if before:
                    found += [(now - moment) / (count - before)] * (count - before)
        return found

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended."""
        self._last.pop(request_id, None)
