"""Engine requests of one HTTP request: waiting for their output, and aborting them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.updates import Progress, Update
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.api_errors import ApiError


@dataclass(eq=False)
class RequestHandle(EngineRequest):
    """Request of the server, with what the event loop knows of its output.

    Attributes:
        progress: Output so far, of a streamed request.
        result: Whole output, once the request has ended.
        error: Reason for a missing result, once the request was given up.
    """

    progress: Progress | None = None
    result: RequestRecord | None = None
    error: ApiError | None = None

    @property
    def has_ended(self) -> bool:
        """True once there is a result or an error."""
        return self.result is not None or self.error is not None

    def take(self, update: Update) -> None:
        """Append an update."""
        if self.progress is None:
            self.progress = Progress(update)
        self.progress.add(update)


@dataclass(eq=False)
class RequestGroup:
    """Handles of one HTTP request.

    Attributes:
        handles: Handles, prompt by prompt.
        on_abort: Aborts handles in the engine.
        sender: Router that sent the request; empty for a request of a client.
        on_result: Called with each record that completes, before it is delivered.
    """

    handles: list[RequestHandle]
    on_abort: Callable[[list[RequestHandle]], None]
    sender: str = ""
    on_result: Callable[[RequestRecord], None] = lambda _: None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def started(self) -> None:
        """Wait until a handle has progress or has ended."""
        while not any(handle.progress or handle.has_ended for handle in self.handles):
            await self.next_update()

    async def ended(self) -> None:
        """Wait until all handles have ended."""
        while not all(handle.has_ended for handle in self.handles):
            await self.next_update()

    async def next_update(self) -> None:
        """Wait until a handle has changed since the last call."""
        await self.changed.wait()
        self.changed.clear()

    def abort(self) -> None:
        """Abort the handles that have not ended; return at once."""
        self.on_abort([handle for handle in self.handles if not handle.has_ended])
