"""Loads from disk as the scheduler sees them: which requests wait for one, and where its entries are put.

The scheduler decides nothing about loads. It is told when one begins, when its entries are at hand, when it is given
up, and how far prefixes of waiting requests go on disk; each of these is a command that every rank obeys alike
(`begin`, `reserve` with `publish`, `end`, `note_run`). Until then nothing is taken for a load: entries are read into
memory of the host. Once they are at hand, blocks for the whole run and the slot of the snapshot are taken at once or
not at all; they can be matched as soon as they are written, and are in no request's way, since they can be evicted
again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import last_boundary
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.scheduling.plan import Deferral, SchedulerLimits
from megatron_ext.scheduling.planner import reads_disk
from megatron_ext.scheduling.publication import tell_published
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request


@dataclass
class DiskLoad:
    """Load that requests wait for.

    Attributes:
        block_hashes: Hashes of all blocks before the resume point, from the start of the sequence.
        first: Number of them that were in memory when it began, and are not read.
        has_snapshot: Whether the snapshot at the resume point is read.
        tokens: Tokens of these blocks.
        root: Root of the block hashes.
        salt: Salt of the root.
        waiting: Requests that have waited for it.
    """

    block_hashes: tuple[BlockHash, ...]
    first: int
    has_snapshot: bool
    tokens: array[int]
    root: BlockHash
    salt: str | None
    waiting: set[Request]

    @property
    def end(self) -> int:
        """Resume point in blocks."""
        return len(self.block_hashes)


@dataclass(frozen=True)
class LoadPlaces:
    """Places of a load's entries, taken and not written yet.

    Attributes:
        number: Number of the load.
        block_hash: Hash of the last block.
        known: Number of entries that were read and are cached by now.
        shared: Blocks that are cached already, from the start of the sequence; referred to until `publish`.
        blocks: Blocks to write, those after them.
        slot: Slot of the snapshot; None if it is not needed.
    """

    number: int
    block_hash: BlockHash
    known: int
    shared: tuple[BlockId, ...]
    blocks: tuple[BlockId, ...]
    slot: SlotId | None


@dataclass(frozen=True)
class BeginLoad:
    """Begin of a load that requests may wait for; see `DiskLoads.begin`."""

    number: int
    request_id: int
    end: int
    has_snapshot: bool


@dataclass(frozen=True)
class PlaceLoad:
    """Placement of a load that all ranks have read, if places for it can be had."""

    number: int


@dataclass(frozen=True)
class EndLoad:
    """End of a load that is given up; `progress` is set if a rank could not read it."""

    number: int
    progress: int | None = None


@dataclass(frozen=True)
class NoteRun:
    """Note of how far the prefix of a waiting request goes on disk; see `DiskLoads.note_run`."""

    request_id: int
    end: int


LoadCommand: TypeAlias = BeginLoad | PlaceLoad | EndLoad | NoteRun


class DiskLoads:
    """Loads of one scheduler.

    Args:
        limits: Limits of the scheduler.
        cache: Cache of the scheduler.
        queues: Queues of the scheduler.

    Attributes:
        is_due: Whether a load can be placed or given up, so that the next step must be planned; set by the one who
            decides about loads.
        record: Takes each command, for other ranks to obey.
    """

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache, queues: Queues) -> None:
        self._limits, self._cache, self._queues = limits, cache, queues
        self._loads: dict[int, DiskLoad] = {}
        self.is_due = False
        self.record: Callable[[LoadCommand], None] = lambda _: None  # no other rank obeys

    def __len__(self) -> int:
        return len(self._loads)

    def numbers(self) -> set[int]:
        """Return the numbers of all loads."""
        return set(self._loads)

    def waiting(self, number: int) -> set[Request]:
        """Return the requests that wait, or have waited, for a load."""
        return self._loads[number].waiting

    # Commands

    def begin(self, number: int, request: Request, end: int, *, has_snapshot: bool) -> int:
        """Let requests wait for a load that lets `request` resume after `end` blocks; return how many are in memory.

        Blocks of the prefix that are in memory count as used now, since the load is of no use without them.
        """
        self.record(BeginLoad(number, request.request_id, end, has_snapshot))
        chain = request.chain
        assert chain is not None, "the request reads the cache"
        size = self._limits.block_size
        matched = list(self._cache.match(request.block_hashes[:end]))
        self._cache.pin(matched)
        self._cache.release(matched)
        self._loads[number] = DiskLoad(
            tuple(request.block_hashes[:end]),
            len(matched),
            has_snapshot,
            request.tokens[: end * size],
            chain.root,
            request.params.cache_salt,
            {request},
        )
        return len(matched)

    def is_useless(self, number: int) -> bool:
        """Return whether a load is of no use: blocks before it were evicted, or no request waits for it any more."""
        load = self._loads[number]
        is_awaited = any(request in self._queues.waiting for request in load.waiting)
        return not is_awaited or len(self._cache.match(load.block_hashes)) < load.first

    def reserve(self, number: int) -> LoadPlaces | None:
        """Take places for all entries of a load whose bytes are at hand; None if they cannot be had at once."""
        self.record(PlaceLoad(number))  # failed or not, since it may evict entries and changes their order
        load, cache = self._loads[number], self._cache
        shared = tuple(cache.match(load.block_hashes))
        missing, key = load.end - len(shared), load.block_hashes[-1]
        states, slot = cache.states if load.has_snapshot else None, None
        if states is not None and (states.find(key) is not None or states.is_reserved(key)):
            states = None  # it is there, or about to be
        if len(shared) < load.first or (states is not None and not states.obtainable_count):
            return None
        cache.pin(shared)
        kept = cache.kept_for_snapshots if self._queues.holding() else 0
        has_room = missing <= cache.available_count - kept
        if has_room and states is not None:
            slot = states.reserve(key)
            shared = tuple(cache.match(load.block_hashes))  # they may have moved to make room for the slot
            has_room = slot is not None and missing <= cache.available_count
        if not has_room:
            cache.release(shared)
            if states is not None and slot is not None:
                states.cancel(key)
            return None
        return LoadPlaces(number, key, len(shared) - load.first, shared, tuple(cache.allocate(missing)), slot)

    def publish(self, places: LoadPlaces) -> int:
        """Let requests find the entries of a load, which have been written; see `end`."""
        load, cache = self._loads[places.number], self._cache
        table, count, size = (*places.shared, *places.blocks), len(places.shared), self._limits.block_size
        if places.blocks:
            hashes, parent = load.block_hashes[count:], load.block_hashes[count - 1] if count else None
            cache.publish(hashes, places.blocks, parent)
            cache.origins.add_blocks(hashes)
            run = PublishedRun(hashes, parent, load.tokens, size, load.end * size, load.salt)
            tell_published(run, load.root, cache, self._queues.waiting)
        if places.slot is not None:
            assert cache.states is not None, "a slot was reserved"
            cache.states.commit(load.block_hashes[-1], is_taken=False)
            cache.origins.add_snapshot(load.block_hashes[-1])
            self._queues.waiting.published(load.block_hashes[-1:])
        cache.release(table, load.block_hashes[-1:] if places.slot is not None else ())
        return self._end(places.number)

    def give_back(self, places: LoadPlaces) -> None:
        """Give back places that were not written."""
        self._cache.release((*places.shared, *places.blocks))
        if places.slot is not None and self._cache.states is not None:
            self._cache.states.cancel(places.block_hash)

    def end(self, number: int, progress: int | None = None) -> int:
        """Let no request wait for a load any more, see `EndLoad`; return the number of requests that have waited."""
        self.record(EndLoad(number, progress))
        return self._end(number)

    def _end(self, number: int) -> int:
        return len(self._loads.pop(number).waiting)

    def note_run(self, request: Request, end: int) -> None:
        """Note how many blocks of a waiting request memory and disk have, so that a snapshot is taken where it ends."""
        self.record(NoteRun(request.request_id, end))
        request.snapshot_plan.end_on_disk = end

    def clear(self) -> None:
        """End all loads."""
        self._loads.clear()
        self.is_due = False

    # Plan

    def awaited_by(self, request: Request, matched: int) -> int | None:
        """Return the number of a load that lets a waiting request resume further; None without one.

        Args:
            request: The request.
            matched: Blocks from its start that are in memory.
        """
        if not self._loads or not reads_disk(request):
            return None
        for number, load in self._loads.items():
            if self._helps(load, request, matched):
                return number
        return None

    def _helps(self, load: DiskLoad, request: Request, matched: int) -> bool:
        hashes, end, states = request.block_hashes, load.end, self._cache.states
        if len(hashes) < end or hashes[end - 1] != load.block_hashes[-1]:
            return False
        if states is None:
            return matched < end
        is_within = end * self._limits.block_size <= last_boundary(len(request.tokens), self._limits.block_size)
        return is_within and (matched < end or states.find(hashes[end - 1]) is None)

    def note(self, deferrals: Iterable[Deferral]) -> None:
        """Note the requests that wait for loads in a step."""
        for one in deferrals:
            if one.load is not None:
                self._loads[one.load].waiting.add(one.request)

    def check(self) -> None:
        """Assert that loads name their blocks and tokens."""
        for load in self._loads.values():
            assert load.first <= load.end > 0, "a load of nothing"
            assert len(load.tokens) == load.end * self._limits.block_size, "a load without its tokens"
