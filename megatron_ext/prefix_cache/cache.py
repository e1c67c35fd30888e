"""Prefix cache facade, the only object that other packages call: match, pin, allocate, publish, release, check."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING, NamedTuple

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.block_index import BlockIndex, CachedPrefix
from megatron_ext.prefix_cache.block_pool import BlockId, BlockPool
from megatron_ext.prefix_cache.cached_token_ids import CachedTokenIds
from megatron_ext.prefix_cache.eviction import LeafFirstLru
from megatron_ext.prefix_cache.eviction_history import EvictionHistory
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.kept_data import KeptData
from megatron_ext.prefix_cache.observer import CacheObserver
from megatron_ext.prefix_cache.origins import DiskOrigins
from megatron_ext.prefix_cache.shared_memory import SharedMemory
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.slabs import NO_CHANGES, ArenaChanges
from megatron_ext.prefix_cache.snapshot_order import SnapshotOrder
from megatron_ext.prefix_cache.state_index import SlotId, StateIndex

if TYPE_CHECKING:
    from megatron_ext.prefix_cache.disk.tier import DiskTier


@dataclass(frozen=True)
class CacheUse:
    """Statistics of the cache: blocks and slots by state, and events since the engine started."""

    blocks_total: int
    blocks_cached: int  # indexed, in use or not
    blocks_evictable: int  # indexed and not in use
    blocks_in_use: int
    blocks_evicted: int  # over the engine's life
    slots_total: int  # of snapshots
    slots_used: int
    slots_evicted: int  # evicted for want of a slot; over the engine's life, as the next three
    snapshots_taken: int
    snapshots_skipped: int  # for want of a slot
    snapshots_replaced: int  # in decode, by the next one of the same request
    provisional_slots: int  # with opportunistic snapshots, which the numbers above leave out
    provisional_taken: int  # over the engine's life, as the next two
    provisional_consumed: int
    provisional_given_up: int
    slabs_total: int = 0  # of memory that blocks and snapshots share; with it, the totals above change as slabs do
    slabs_of_blocks: int = 0
    slabs_of_snapshots: int = 0
    slabs_retyped: int = 0  # changes between blocks and snapshots, over the engine's life
    blocks_moved: int = 0  # to free a slab, over the engine's life


class CachedEntry(NamedTuple):
    """Cached entry, and where its bytes lie.

    Attributes:
        block_hash: Hash of the block, or of the block at whose end the snapshot was taken.
        parent: Hash of the block before; None for the first one of a sequence.
        depth: Blocks from the start of the sequence, this one included.
        block: Where the bytes of a block lie until pending copies are made; None for a snapshot.
        slot: The same of a snapshot; None for a block.
    """

    block_hash: BlockHash
    parent: BlockHash | None
    depth: int
    block: BlockId | None
    slot: SlotId | None


class PrefixCache:
    """Pool of KV blocks whose contents can be found again by block hash.

    Every block is in one of three states: free, in use (referred to by requests; indexed or not), evictable (indexed,
    not in use). Published blocks of one request are a chain in the index: `publish` swaps a block for an indexed block
    with the same contents, so a request that uses a block uses its parents, and any evictable block may be evicted.
    Blocks are allocated and released in runs, with bulk operations on lists, dictionaries and sets.

    A block hash can be *wanted* by waiting requests while another request computes it (`want`, `unwant`): then its
    block and all before it stay cached even if the policy would drop them. They can still be evicted.

    In a model with recurrent layers `states` is the index of their snapshots. A snapshot is dropped with its block, and
    may be dropped alone.

    Without a policy no block is ever indexed, and the cache is just the pool.

    Args:
        total: Blocks in the pool.
        policy: Eviction policy for cached blocks that are not in use; None disables caching.
        slots: Snapshot slots, 0 or more; None for a model without recurrent layers.
        keeps_tokens: Whether to keep the token ids of cached blocks, for explanations.
        slabs: Memory that blocks and snapshots share, in place of `total` and `slots`; None if each has its own.
    """

    def __init__(
        self,
        total: int,
        policy: EvictionPolicyName | None,
        slots: int | None = None,
        *,
        keeps_tokens: bool = False,
        slabs: SlabLayout | None = None,
    ) -> None:
        self.is_enabled = policy is not None
        self.epoch = 0  # blocks begun in an earlier epoch are not published
        self.index = BlockIndex()
        self._keeps_unused = policy is EvictionPolicyName.LRU
        clock = count()
        self.unused = LeafFirstLru(clock)  # cached blocks that no request uses
        self.shared_memory: SharedMemory | None = None
        self.states: StateIndex | None = None
        if slabs is not None:
            self.shared_memory = SharedMemory(slabs, self, clock)
            self.pool, self.states = self.shared_memory.pool, self.shared_memory.states
        else:
            self.pool = BlockPool(total)
            self.states = None if slots is None else StateIndex(slots, self, SnapshotOrder(clock))
        self.eviction_history = EvictionHistory()
        self.kept = KeptData()
        self.cached_token_ids = CachedTokenIds() if keeps_tokens else None
        self.are_copies_pending = False  # of messages told: copies in the memory that blocks and snapshots share
        self.origins = DiskOrigins()
        self.observers: list[CacheObserver] = []  # stored blocks are reported by the publisher, all else here
        self.lower_tier: DiskTier | None = None  # takes evicted entries
        self._wanted: dict[BlockHash, int] = {}  # number of waiting requests
        self._spared: Sequence[Sequence[BlockHash]] = ()  # see `spare`
        if self.states is not None:
            self.states.is_spared = self._is_spared
        self._evicted = 0

    @property
    def available_count(self) -> int:
        """Number of blocks that `allocate` can hand out: free and evictable ones, and those in place of snapshots."""
        from_snapshots = 0 if self.shared_memory is None else self.shared_memory.obtainable_from_snapshots
        return self.pool.free_count + len(self.unused) + from_snapshots

    @property
    def kept_for_snapshots(self) -> int:
        """Number of available blocks, those in place of snapshots, that new requests leave alone while others run."""
        return 0 if self.shared_memory is None else self.shared_memory.kept_for_snapshots

    @property
    def changes(self) -> ArenaChanges:
        """Changes of the memory that blocks and snapshots share which no step's message has told yet."""
        return NO_CHANGES if self.shared_memory is None else self.shared_memory.arena.changes

    def note_changes_sent(self) -> None:
        """Note that a message with all `changes` is on its way."""
        self.are_copies_pending |= self.changes.has_copies
        if self.shared_memory is not None:
            self.shared_memory.arena.note_changes_sent()

    def note_changes_applied(self) -> None:
        """Note that all changes of earlier messages have been made."""
        self.are_copies_pending = False

    def match(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockId]:
        """Return the blocks of the longest cached run from the start. Read-only: pin them before any allocation."""
        return self.index.longest_run(block_hashes)

    def find(self, block_hash: BlockHash) -> BlockId | None:
        """Return the cached block of `block_hash`, or None."""
        return self.index.find(block_hash)

    def depth_of(self, block_hash: BlockHash) -> int:
        """Return the depth of a cached block: blocks from the start of its sequence to its end."""
        return self.index.depth(block_hash)

    def is_evictable(self, block: BlockId) -> bool:
        """Return whether `block` is evictable, so that pinning it leaves one block fewer available."""
        return block in self.unused

    def pin(self, blocks: Sequence[BlockId]) -> None:
        """Take a reference to each matched block."""
        assert len(self.index.among(blocks)) == len(blocks), f"some of {blocks} are not cached"
        self.unused.take_out(self.pool.retain(blocks))

    def allocate(self, count: int) -> list[BlockId]:
        """Allocate `count` blocks without contents, evicting as many evictable blocks as needed."""
        assert count <= self.available_count, f"{count} blocks asked, {self.available_count} available"
        evict = self.evict if self.shared_memory is None else self.shared_memory.make_blocks
        while (missing := count - self.pool.free_count) > 0:
            evict(missing)
        return self.pool.allocate(count)

    def evict(self, count: int, limit: float = math.inf) -> int:
        """Evict at most `count` blocks with priorities up to `limit`, none if all are spared; return how many."""
        most = min(count, len(self.unused)) if self._keeps_unused else 1
        blocks = self.unused.evict(most, limit, self._spared_run if self._spared else None)
        if not blocks:
            return 0
        parent = self.index.parent(blocks[-1])
        if self.lower_tier is not None:
            self.lower_tier.on_evicted(self._evicted_entries(blocks))
        self.eviction_history.on_blocks_evicted(list(map(self.index.hash_of, blocks)), self.states)
        self._drop(blocks)
        self._evicted += len(blocks)
        self._drop_unneeded(parent)  # its wanted child is gone
        return len(blocks)

    def _evicted_entries(self, blocks: Iterable[BlockId]) -> list[CachedEntry]:
        """Return cached blocks, each followed by its snapshot, if a request has asked for it."""
        found, states = [], self.states
        for block_hash in map(self.index.hash_of, blocks):
            found.append(self.entry(block_hash, is_snapshot=False))
            if states is not None and states.among([block_hash]) and not states.is_provisional(block_hash):
                found.append(self.entry(block_hash, is_snapshot=True))
        return found

    def entry(self, block_hash: BlockHash, *, is_snapshot: bool) -> CachedEntry:
        """Return the cached block of a hash, or its visible snapshot."""
        arena = None if self.shared_memory is None else self.shared_memory.arena
        parent, depth = self.index.parent_hash(block_hash), self.index.depth(block_hash)
        if is_snapshot:
            slot = None if self.states is None else self.states.find(block_hash)
            assert slot is not None, "the snapshot is visible"
            slot = slot if arena is None else arena.source_of_snapshot(block_hash, slot)
            return CachedEntry(block_hash, parent, depth, None, slot)
        block = self.index.find(block_hash)
        assert block is not None, "the block is cached"
        return CachedEntry(block_hash, parent, depth, block if arena is None else arena.source_of_block(block), None)

    def spare(self, runs: Sequence[Sequence[BlockHash]]) -> None:
        """Evict the cached blocks and snapshots of these sequences after all others from now on."""
        self._spared = runs

    def _is_spared(self, block_hash: BlockHash) -> bool:
        depth = self.index.depth(block_hash) if self._spared else 0
        return any(len(run) >= depth and run[depth - 1] == block_hash for run in self._spared)

    def _spared_run(self, block: BlockId) -> list[BlockId]:
        """Return a spared block and the unused ones before it, from its end; an empty list if it is not spared."""
        index, block_hash = self.index, self.index.hash_of(block)
        if not self._is_spared(block_hash):
            return []
        found = map(index.find, index.ancestors(block_hash))
        before = (one for one in found if one is not None)
        return [block, *takewhile(lambda one: not self.pool.references(one), before)]

    def want(self, block_hash: BlockHash) -> None:
        """Keep the block of `block_hash`, once it is computed, and all before it, for a waiting request."""
        self._wanted[block_hash] = self._wanted.get(block_hash, 0) + 1

    def unwant(self, block_hash: BlockHash) -> None:
        """Undo one `want`: the request no longer waits for the block of `block_hash`."""
        self._wanted[block_hash] -= 1
        if not self._wanted[block_hash]:
            del self._wanted[block_hash]
            self._drop_unneeded(self.index.find(block_hash))

    def wanted(self) -> dict[BlockHash, int]:
        """Return the wanted block hashes, each with the number of requests that wait for it."""
        return dict(self._wanted)

    def _is_needed(self, block: BlockId) -> bool:
        """Return whether the cached `block` is wanted by a waiting request, or has a cached child."""
        return self.index.hash_of(block) in self._wanted or self.index.children(block) > 0

    def _drop_unneeded(self, block: BlockId | None) -> None:
        """Drop `block` if it was kept only for waiting requests and none is left; then its parent, and so on."""
        while block is not None and not self._keeps_unused and block in self.unused:
            if self._is_needed(block):
                return
            parent = self.index.parent(block)
            self.unused.take_out([block])
            self._drop([block])
            block = parent

    def publish(
        self, block_hashes: Sequence[BlockHash], blocks: Sequence[BlockId], parent: BlockHash | None
    ) -> tuple[BlockId, ...]:
        """Index a run of blocks, which continues `parent` and has been computed, so that other requests can find it.

        Returns:
            The blocks to use from now on: each itself, or the cached block with the same contents; then the caller's
            reference moves to that one, and its own block is released. Since an indexed block's parents are indexed,
            contents that are cached already are at the start of the run.
        """
        known = list(self.index.longest_run(block_hashes))
        count = len(known)
        if known:
            swapped = [(own, other) for own, other in zip(blocks, known, strict=False) if own != other]
            self.pin([other for _, other in swapped])
            self.pool.release([own for own, _ in swapped])
            parent, block_hashes, blocks = block_hashes[count - 1], block_hashes[count:], blocks[count:]
        if block_hashes:
            self.index.add(block_hashes, blocks, parent)
            self.eviction_history.on_blocks_stored(block_hashes)
            if self.shared_memory is not None:
                self.shared_memory.reuse.on_blocks_stored(block_hashes)
        return (*known, *blocks)

    def release(self, table: Sequence[BlockId], snapshots: Iterable[BlockHash] = ()) -> None:
        """Drop one reference to each block of a request's table; cached blocks without one pass to the policy.

        Args:
            table: Blocks of the request.
            snapshots: Snapshots that it resumed from or took, which are as recently used as its blocks.
        """
        unused = self.pool.let_go(reversed(table))
        kept = self.index.among(unused) if self._keeps_unused else self._keep_needed(unused)
        self.unused.hold(kept)
        if len(kept) < len(unused):
            self.pool.free([block for block in unused if block not in self.index])
        if self.shared_memory is not None:
            for block_hash in snapshots:
                self.shared_memory.states.touch(block_hash)

    def _keep_needed(self, unused: Iterable[BlockId]) -> list[BlockId]:
        """Return the needed blocks among unused ones, given from a sequence's end to its start; forget the others."""
        kept = []
        for block in self.index.among(unused):
            if self._is_needed(block):
                kept.append(block)
            else:
                self._forget([block])
        return kept

    def _drop(self, blocks: Sequence[BlockId]) -> None:
        self._forget(blocks)
        self.pool.free(blocks)

    def _forget(self, blocks: Sequence[BlockId]) -> None:
        block_hashes = self.index.remove(blocks)
        if self.states is not None:
            for block_hash in self.states.among(block_hashes):
                self.states.drop(block_hash)
        self.origins.drop_blocks(block_hashes)
        self.kept.drop(block_hashes)
        if self.cached_token_ids is not None:
            for block_hash in block_hashes:
                self.cached_token_ids.drop(block_hash)
        for observer in self.observers:
            observer.on_blocks_removed(block_hashes)

    def continuations(self, block_hash: BlockHash, *, itself: bool) -> list[BlockId]:
        """Return the cached blocks that continue the one of `block_hash`, and that one; each after its children."""
        found = self.index.descendants(block_hash)
        return [one for one in found if itself or self.index.hash_of(one) != block_hash]

    def drop_all(self, blocks: Iterable[BlockId]) -> int:
        """Drop cached blocks that no request uses, each after its children; return how many were still cached."""
        dropped = 0
        for block in blocks:
            if block in self.unused:  # `ref_zero` may have dropped it on release
                self.unused.take_out([block])
                self._drop([block])
                dropped += 1
        return dropped

    def reset(self) -> None:
        """Forget all contents: no block cached before is matched, and no block begun before is published."""
        self.pool.free(list(self.unused))
        self.unused.clear()
        self.index.clear()
        if self.states is not None:
            self.states.clear()
        self.eviction_history.clear()
        self.origins.clear()
        self.kept.clear()
        if self.cached_token_ids is not None:
            self.cached_token_ids.clear()
        for observer in self.observers:
            observer.on_cleared()
        if self.lower_tier is not None:
            self.lower_tier.clear()
        self.epoch += 1

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """Handle a snapshot that has become visible; `StateIndex` calls this and the next four."""
        self.eviction_history.on_snapshot_stored(block_hash)
        for observer in self.observers:
            observer.on_snapshot_stored(block_hash)

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Handle a snapshot that has left its slot, for any reason."""
        self.origins.drop_snapshot(block_hash)
        for observer in self.observers:
            observer.on_snapshot_removed(block_hash)

    def on_snapshot_evicted(self, block_hash: BlockHash) -> None:
        """Let the tier below take a snapshot, not opportunistic, that is about to leave its slot for want of memory."""
        if self.lower_tier is not None:
            self.lower_tier.on_evicted([self.entry(block_hash, is_snapshot=True)])

    def on_snapshot_displaced(self, block_hash: BlockHash) -> None:
        """Record a snapshot that lost its slot to another one or found none: more slots would have kept it."""
        self.eviction_history.on_snapshot_removed(block_hash)

    def on_snapshot_replaced(self, block_hash: BlockHash) -> None:
        """Drop the record, if any, of a snapshot that the next one of the same request replaces."""
        self.eviction_history.on_snapshot_stored(block_hash)

    def note_prompt(self, block_hashes: Sequence[BlockHash]) -> None:
        """Record the blocks of the prompt of a request that is admitted for the first time."""
        if self.shared_memory is not None:
            self.shared_memory.reuse.on_prompt(block_hashes)

    def count_hit(self, block: BlockId) -> None:
        """Count a request that has resumed at the end of `block`, or within it."""
        self.index.count_hit(block)

    def hottest(self, count: int) -> list[CachedPrefix]:
        """Return the prefixes that most requests resumed from, the hottest first."""
        return self.index.hottest(count)

    def by_worth(self) -> Iterator[tuple[BlockHash, bool]]:
        """Yield block hashes and whether each stands for a snapshot, by falling worth, a block after its parents.

        A snapshot follows its block. Blocks that no snapshot needs come last, as far as there are snapshots.
        """
        index, yielded = self.index, set[BlockHash]()
        snapshots = [] if self.states is None else self.states.by_priority()[::-1]
        in_use = [block for block in index if block not in self.unused]
        blocks = [index.hash_of(block) for block in (*in_use, *reversed(list(self.unused)))]
        for ends, has_snapshot in ((snapshots, True), (blocks, False)):
            for end in ends:
                chain = takewhile(lambda one: one not in yielded, (end, *index.ancestors(end)))
                for block_hash in reversed(list(chain)):
                    yielded.add(block_hash)
                    yield block_hash, False
                if has_snapshot:
                    yield end, True

    def use(self) -> CacheUse:
        """Return the statistics of the cache, for monitoring."""
        memory, states = self.shared_memory, self.states or StateIndex(0, self, SnapshotOrder(count()))
        arena = None if memory is None else memory.arena
        total = self.pool.total - (0 if arena is None else arena.snapshot_count * arena.layout.blocks_per_slab)
        return CacheUse(
            blocks_total=total,
            blocks_cached=len(self.index),
            blocks_evictable=len(self.unused),
            blocks_in_use=total - self.pool.free_count - len(self.unused),
            blocks_evicted=self._evicted,
            slots_total=states.total if arena is None else arena.snapshot_count,
            slots_used=states.used_count,
            slots_evicted=states.evicted,
            snapshots_taken=states.taken,
            snapshots_skipped=states.skipped,
            snapshots_replaced=states.replaced,
            provisional_slots=states.used_provisional_count,
            provisional_taken=states.provisional_taken,
            provisional_consumed=states.provisional_consumed,
            provisional_given_up=states.provisional_given_up,
            slabs_total=0 if arena is None else arena.layout.slabs,
            slabs_of_blocks=0 if arena is None else arena.blocks.slab_count,
            slabs_of_snapshots=0 if arena is None else arena.snapshot_count,
            slabs_retyped=0 if arena is None else arena.retyped_count,
            blocks_moved=0 if arena is None else arena.blocks.moved_count,
        )

    def check(self) -> None:
        """Assert that free, evictable and used blocks make up the pool, and that the index is a sound forest."""
        index, cached = self.index, set(self.index.block_hashes())
        index.check()
        if self.shared_memory is not None:
            self.shared_memory.check(cached)
        else:
            self.pool.check(self.unused)
            if self.states is not None:
                self.states.check(cached)
        if self.cached_token_ids is not None:
            self.cached_token_ids.check(cached)
        snapshots = set() if self.states is None else set(self.states.visible())
        self.eviction_history.check(cached, snapshots)
        self.origins.check(cached, snapshots)
        self.kept.check(cached)
        self.unused.check()
        evictable = set(self.unused)
        assert evictable <= set(index), "an evictable block is not indexed"
        for block in index:
            assert block in evictable or self.pool.references(block) > 0, f"cached block {block} is free"
            parent = index.parent(block)
            assert parent is None or block in evictable or parent not in evictable, (
                f"block {block} outlives its parent's use"
            )
        assert all(count > 0 for count in self._wanted.values()), "a wanted block without requests"
        if not self._keeps_unused:
            assert all(map(self._is_needed, self.unused)), "a block is kept without a request that wants it"
