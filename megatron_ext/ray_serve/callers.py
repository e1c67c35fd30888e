"""Ingresses whose requests a replica answers: requests of one that is lost have no reader, and end.

Ray does not tell an actor that the caller of its method has ended. So a replica asks each ingress for a sign of life as
long as it answers requests of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError

logger = logging.getLogger(__name__)

_PERIOD = 1.0  # seconds between an answer and the next call


@dataclass
class _Caller:
    requests: list[asyncio.Event] = field(default_factory=list)
    watching: asyncio.Task[None] | None = None


class Callers:
    """Callers with requests in flight. Its methods are called in one event loop."""

    def __init__(self) -> None:
        self._callers: dict[ActorHandle, _Caller] = {}

    @contextlib.contextmanager
    def answering(self, caller: ActorHandle) -> Iterator[asyncio.Event]:
        """Watch a caller during a request; yield the event of its loss."""
        one = self._callers.setdefault(caller, _Caller())
        lost = asyncio.Event()
        one.requests.append(lost)
        if one.watching is None:
            one.watching = asyncio.create_task(self._watch(caller, one.requests))
        try:
            yield lost
        finally:
            one.requests.remove(lost)
            if not one.requests and one.watching is not None:
                one.watching.cancel()
                del self._callers[caller]

    async def _watch(self, caller: ActorHandle, requests: list[asyncio.Event]) -> None:
        with contextlib.suppress(ActorDiedError):
            while True:
                with contextlib.suppress(ActorUnavailableError):  # known to be dead, or available again, after a while
                    await caller.__ray_ready__.remote()
                await asyncio.sleep(_PERIOD)
        logger.warning("an ingress is lost; %d requests of it end", len(requests))
        for lost in requests:
            lost.set()
