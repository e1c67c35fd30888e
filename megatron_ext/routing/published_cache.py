"""Contents of one cache of a replica as its KV events report them, passed on to the router."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_ext.kv_events.events import (
    AllBlocksCleared,
    AllStatesCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Hash,
    StateRemoved,
    StateStored,
)
from megatron_ext.routing.router import Router

_SLICE = 256  # blocks that are removed between two turns of the event loop


class EventError(ValueError):
    """Error of an event that contradicts what the replica has said before: its reports cannot be trusted any more."""


class PublishedCache:
    """Blocks and snapshots of one cache, by its events.

    A snapshot can be reported before its block or outlive it here: a report has all events of blocks first, then those
    of states. The router knows a snapshot while both it and its block are reported.

    Args:
        router: Router to update; the replica has joined it.
        replica: Name of the replica in the router.
        rank: Rank of the cache in the replica's world; equal blocks of two caches have equal hashes.
        block_size: Tokens of a block.
        max_blocks: Blocks of the cache's pool.
    """

    def __init__(self, router: Router, replica: str, rank: int, block_size: int, max_blocks: int) -> None:
        self._router, self._replica, self._rank = router, replica, rank
        self._block_size, self._max_blocks = block_size, max_blocks
        self._blocks: dict[Hash, None] = {}  # each after its parent
        self._states: dict[Hash, None] = {}  # all reported snapshots, even if their block is unknown

    def _tagged(self, hashes: Iterable[Hash]) -> list[tuple[int, Hash]]:
        return [(self._rank, one) for one in hashes]

    def apply_blocks(self, event: Event) -> Iterator[None]:
        """Apply an event of blocks; yield where other tasks may run.

        Raises:
            EventError: The event cannot be one of this cache.
        """
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            self._remove(event.hashes)
        elif isinstance(event, AllBlocksCleared):
            yield from self.clear_blocks()
        else:
            raise EventError(f"{type(event).__name__} among the events of blocks")

    def apply_states(self, event: Event) -> Iterator[None]:
        """Apply an event of states; yield where other tasks may run.

        Raises:
            EventError: The event cannot be one of this cache.
        """
        if isinstance(event, StateStored):
            self._states.update(dict.fromkeys(event.hashes))
            self._check(len(self._states), "snapshots")
            known = [one for one in event.hashes if one in self._blocks]
            self._router.state_stored(self._replica, self._tagged(known))
        elif isinstance(event, StateRemoved):
            self._remove_states(event.hashes)
        elif isinstance(event, AllStatesCleared):
            yield from self.clear_states()
        else:
            raise EventError(f"{type(event).__name__} among the events of states")

    def clear_blocks(self) -> Iterator[None]:
        """Remove all blocks, slice by slice, each after its children."""
        while self._blocks:
            self._remove([self._blocks.popitem()[0] for _ in range(min(_SLICE, len(self._blocks)))])
            yield

    def clear_states(self) -> Iterator[None]:
        """Remove all snapshots, slice by slice."""
        while self._states:
            self._remove_states([self._states.popitem()[0] for _ in range(min(_SLICE, len(self._states)))])
            yield

    def _store(self, event: BlockStored) -> None:
        if event.block_size != self._block_size:
            raise EventError(f"a block of {event.block_size} tokens in a cache with blocks of {self._block_size}")
        if event.parent is not None and event.parent not in self._blocks:
            raise EventError("blocks after one that is not known")
        self._blocks.update(dict.fromkeys(event.hashes))
        self._check(len(self._blocks), "blocks")
        parent = None if event.parent is None else (self._rank, event.parent)
        self._router.stored(self._replica, self._tagged(event.hashes), parent, event.tokens, event.extra_keys)
        resumable = [one for one in event.hashes if one in self._states]
        self._router.state_stored(self._replica, self._tagged(resumable))

    def _check(self, count: int, what: str) -> None:
        if count > self._max_blocks:
            raise EventError(f"{count} {what} in a cache of {self._max_blocks} blocks")

    def _remove(self, hashes: Iterable[Hash]) -> None:
        for one in hashes:
            self._blocks.pop(one, None)
        self._router.removed(self._replica, self._tagged(hashes))

    def _remove_states(self, hashes: Iterable[Hash]) -> None:
        for one in hashes:
            self._states.pop(one, None)
        self._router.state_removed(self._replica, self._tagged(hashes))
