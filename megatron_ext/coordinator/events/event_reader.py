"""KV event subscription of a replica: its events update the router, and lost ones are replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megatron_ext.coordinator.events.event_stream import EventStream, Faults
from megatron_ext.coordinator.membership.heartbeat import EventSource
from megatron_ext.routing.published_cache import PublishedCache
from megatron_ext.routing.router import Router


class EventReader:
    """Reader of one replica's events, until it is closed.

    Args:
        router: Router to update; the replica has joined it.
        replica: Name of the replica in the router.
        sources: Event sources of its caches, one for each data-parallel rank of its world.
        block_size: Tokens of a block.
        max_blocks: Blocks of each cache's pool.
        on_fault: Called when a message is not valid, is not replayed, or fails the reader.
    """

    def __init__(
        self,
        router: Router,
        replica: str,
        sources: Sequence[EventSource],
        block_size: int,
        max_blocks: int,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        faults = self._faults = Faults(replica, on_fault=on_fault)
        self._streams: list[EventStream] = []
        for rank, one in enumerate(sources):
            cache = PublishedCache(router, replica, rank, block_size, max_blocks)
            blocks, states = (cache.apply_blocks, cache.clear_blocks), (cache.apply_states, cache.clear_states)
            self._streams.append(EventStream(one.endpoint, one.replay, one.topic, *blocks, faults))
            if one.states is not None:
                self._streams.append(EventStream(one.states, one.states_replay, one.topic, *states, faults))
        create_task = asyncio.get_running_loop().create_task
        self._tasks = [create_task(stream.run()) for stream in self._streams]

    def close(self) -> None:
        """Stop reading; the router gets no more updates."""
        for task in self._tasks:
            task.cancel()

    @property
    def events(self) -> int:
        """Number of events that have been applied."""
        return sum(stream.read for stream in self._streams)

    @property
    def faults(self) -> int:
        """Number of faults: messages that were not valid or not replayed, and failures of the reader."""
        return self._faults.count
