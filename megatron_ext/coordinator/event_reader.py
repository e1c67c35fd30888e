"""KV event subscription of a replica: its events update the router, and lost ones are replayed.

A reader starts with the current contents of the cache, so a restarted coordinator knows them at once. Later it requests
a replay when a sequence number is skipped, and periodically when no event has arrived, since the last event may be the
lost one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import zmq
import zmq.asyncio

from megatron_ext.coordinator.heartbeat import EventSource
from megatron_ext.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Hash,
    StateRemoved,
    StateStored,
)
from megatron_ext.kv_events.wire import END_OF_REPLAY, SEQUENCE_BYTES, WireError, decode
from megatron_ext.routing.router import Router

logger = logging.getLogger(__name__)

QUIET = 2.0  # seconds without an event before a replay is requested
PATIENCE = 5.0  # seconds for an answer
_EVERYTHING = (1 << 63) - 1  # a number beyond all events: its replay is the current contents
_MAX_WAITING = 10_000  # events that ZeroMQ queues; more are lost, and replayed
_REST = 1.0  # seconds between two requests for the whole contents


class EventReader:
    """Reader of one replica's events, until it is closed.

    Args:
        router: Router to update; the replica has joined it.
        replica: Name of the replica in the router.
        sources: Event sources of its caches, one for each data-parallel rank of its world.
    """

    def __init__(self, router: Router, replica: str, sources: Sequence[EventSource]) -> None:
        self._router = router
        self._replica = replica
        # Hashes by rank; not kept for a single cache, whose hashes the router has.
        self._held: dict[int, set[Hash]] = {rank: set() for rank in range(len(sources))} if len(sources) > 1 else {}
        self._streams = [_Stream(self, rank, source) for rank, source in enumerate(sources)]
        create_task = asyncio.get_running_loop().create_task
        self._tasks = [create_task(stream.run()) for stream in self._streams]

    def close(self) -> None:
        """Stop reading; the router gets no more updates."""
        for task in self._tasks:
            task.cancel()

    @property
    def events(self) -> int:
        """Number of events that have been read."""
        return sum(stream.read for stream in self._streams)

    def tell(self, rank: int, event: Event) -> bool:
        """Pass an event on to the router.

        Returns:
            Whether the event fits the known contents; if not, an event was lost.
        """
        router, replica = self._router, self._replica

        def tagged(hashes: Sequence[Hash]) -> list[Hash]:
            return [(rank, one) for one in hashes]  # equal blocks have equal hashes in two caches of one process

        held = self._held.get(rank)
        if isinstance(event, BlockStored):
            if held is not None:
                held.update(event.hashes)
            parent = None if event.parent is None else (rank, event.parent)
            return router.stored(replica, tagged(event.hashes), parent, event.tokens, event.extra_keys)
        if isinstance(event, StateStored):
            return router.state_stored(replica, tagged(event.hashes))
        if isinstance(event, BlockRemoved):
            if held is not None:
                held.difference_update(event.hashes)
            router.removed(replica, tagged(event.hashes))
        elif isinstance(event, StateRemoved):
            router.state_removed(replica, tagged(event.hashes))
        elif isinstance(event, AllBlocksCleared):
            self._clear(rank)
        return True

    def _clear(self, rank: int) -> None:
        """Remove the blocks of one cache that no other cache of the replica holds."""
        held = self._held.get(rank)
        if held is None:
            self._router.cleared(self._replica)
        else:
            self._router.removed(self._replica, [(rank, one) for one in held])
            held.clear()


class _Stream:
    """Event stream of one cache."""

    def __init__(self, reader: EventReader, rank: int, source: EventSource) -> None:
        self._reader = reader
        self._source = source
        self.rank = rank
        self.is_whole = True  # the router knows the whole contents of the cache
        self.read = 0  # events
        self._next = 0  # number of the next event

    async def run(self) -> None:
        """Read events until cancelled."""
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.SUB) as events:
            events.setsockopt(zmq.LINGER, 0)
            events.setsockopt(zmq.RCVHWM, _MAX_WAITING)
            events.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
            events.connect(self._source.endpoint)
            await self._ask(_EVERYTHING)
            while True:
                if not self.is_whole and self._source.replay is not None:
                    await asyncio.sleep(_REST)
                    await self._ask(_EVERYTHING)
                try:
                    frames = await asyncio.wait_for(events.recv_multipart(), QUIET)
                except asyncio.TimeoutError:
                    await self._ask(self._next)
                    continue
                if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES:
                    await self._take(int.from_bytes(frames[1], "big"), frames[2])

    async def _take(self, number: int, payload: bytes) -> None:
        if number > self._next:
            await self._ask(self._next)
        if number >= self._next:  # otherwise already replayed
            self._tell(number, payload)

    def _tell(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        try:
            fits = [self._reader.tell(self.rank, event) for event in decode(payload).events]
        except (WireError, ValueError) as error:
            logger.warning("events of a replica at %s: %s", self._source.endpoint, error)
            fits = [False]
        self.read += len(fits)
        self.is_whole = self.is_whole and all(fits)

    async def _ask(self, start: int) -> None:
        """Replay all events from a number on; if they are no longer kept, the replay is the current contents."""
        if self._source.replay is None:
            return
        with zmq.asyncio.Context.instance().socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(self._source.replay)
            await asking.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            try:
                while True:
                    frames = await asyncio.wait_for(asking.recv_multipart(), PATIENCE)
                    if len(frames) != 3 or frames[1] == END_OF_REPLAY:
                        break
                    if start == _EVERYTHING:
                        self.is_whole = True
                    self._tell(int.from_bytes(frames[1], "big"), frames[2])
            except asyncio.TimeoutError:
                logger.warning("the replica at %s does not replay its events", self._source.replay)
