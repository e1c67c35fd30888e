"""Engine requests of one HTTP request: waiting for their output, and aborting them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_ext.server.client.request_handle import RequestHandle


@dataclass(eq=False)
class RequestGroup:
    """Handles of one HTTP request.

    Attributes:
        handles: Handles, prompt by prompt.
        on_abort: Aborts handles in the engine.
        sender: Router that sent the request; empty for a request of a client.
    """

    handles: list[RequestHandle]
    on_abort: Callable[[list[RequestHandle]], None]
    sender: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def started(self) -> None:
        """Wait until a handle has progress or has ended."""
        while not any(handle.progress or handle.record or handle.error for handle in self.handles):
            await self.next_update()

    async def ended(self) -> None:
        """Wait until all handles have ended."""
        while not all(handle.record or handle.error for handle in self.handles):
            await self.next_update()

    async def next_update(self) -> None:
        """Wait until a handle has changed since the last call."""
        await self.changed.wait()
        self.changed.clear()

    def abort(self) -> None:
        """Abort the handles that have not ended; return at once."""
        self.on_abort([handle for handle in self.handles if not (handle.record or handle.error)])
