"""The one object that others talk to: match, pin, allocate, publish, release, check."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import NEUTRAL_COSTS, EntryCosts
from megatron_ext.prefix_cache.block_index import BlockIndex, CachedPrefix
from megatron_ext.prefix_cache.block_pool import BlockId, BlockPool
from megatron_ext.prefix_cache.cached_token_ids import CachedTokenIds
from megatron_ext.prefix_cache.divergence import Divergences
from megatron_ext.prefix_cache.eviction import build_policies
from megatron_ext.prefix_cache.ghosts import Ghosts
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.observer import CacheObserver
from megatron_ext.prefix_cache.state_index import StateIndex


@dataclass(frozen=True)
class CacheUse:
    """Blocks of the pool by what they are, and what happened to them since the engine started."""

    blocks_total: int
    blocks_cached: int  # indexed, in use or not
    blocks_evictable: int  # indexed and not in use
    blocks_in_use: int
    blocks_evicted: int  # over the engine's life
    slots_total: int  # of snapshots
    slots_used: int
    slots_evicted: int  # given up for want of a slot; over the engine's life, as the next three
    snapshots_taken: int
    snapshots_skipped: int  # for want of a slot
    snapshots_replaced: int  # in decode, by the next one of the same request
    provisional_slots: int  # with opportunistic snapshots, which none of the numbers above counts
    provisional_taken: int  # over the engine's life, as the next two
    provisional_consumed: int
    provisional_given_up: int

    @classmethod
    def total(cls, parts: Sequence[CacheUse]) -> CacheUse:
        """Of several caches."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: sum(getattr(part, name) for part in parts) for name in names})


class PrefixCache:
    """Blocks with contents that can be found again.

    Every block is in one of three states: free, in use (referred to by requests; indexed or not), evictable (indexed,
    not in use). Published blocks of one request are a chain in the index: `publish` swaps a block for the one that
    holds the same contents already, so whoever uses a block uses its parents, and any evictable block may go. Blocks
    are taken and given in runs: what costs something for each of them is a list, a dictionary or a set as a whole.

    A block hash can be *wanted* by waiting requests that somebody computes it for (`want`, `unwant`): then its block
    and all before it stay cached even if the policy would drop them. They can still be evicted.

    In a model with recurrent layers `states` is the index of their snapshots. A snapshot goes when its block goes, and
    may go alone.

    Without a policy nothing is ever indexed, and this is just the pool.

    Args:
        total: Blocks.
        policy: What happens to cached blocks nobody uses; None caches nothing.
        slots: Snapshot slots, of which there may be none; None for a model without recurrent layers.
        costs: What entries save, and what they take; for policies that weigh them.
        keeps_tokens: Keep the token ids of cached blocks, for explanations.
    """

    def __init__(
        self,
        total: int,
        policy: EvictionPolicyName | None,
        slots: int | None = None,
        costs: EntryCosts = NEUTRAL_COSTS,
        *,
        keeps_tokens: bool = False,
    ) -> None:
        self.pool = BlockPool(total)
        self.is_enabled = policy is not None
        self.policy_name = policy
        self.epoch = 0  # what was begun in an earlier one is not published
        self._index = BlockIndex()
        policies = build_policies(policy or EvictionPolicyName.REF_ZERO, self._index, costs, has_states=bool(slots))
        self._policy = policies.blocks
        self.states = None if slots is None else StateIndex(slots, policies.snapshots, self)
        self.ghosts = Ghosts()
        self.divergences = Divergences()
        self.cached_token_ids = CachedTokenIds() if keeps_tokens else None
        self.observer: CacheObserver | None = None  # who publishes says which blocks are there; the rest is told here
        self._wanted: dict[BlockHash, int] = {}  # by how many
        self._evicted = 0

    @property
    def available_count(self) -> int:
        """Blocks that `allocate` can hand out: free ones, and evictable ones."""
        return self.pool.free_count + len(self._policy)

    def match(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockId]:
        """Blocks of the longest cached run from the start. Changes nothing; pin them before anything is allocated."""
        return self._index.longest_run(block_hashes)

    def depth_of(self, block_hash: BlockHash) -> int:
        """Blocks from the start of its sequence to the end of the cached one that holds `block_hash`."""
        return self._index.depth(block_hash)

    def is_evictable(self, block: BlockId) -> bool:
        """Whether pinning `block` would make one block less available."""
        return block in self._policy

    def pin(self, blocks: Sequence[BlockId]) -> None:
        """Take a reference to each matched block."""
        assert len(self._index.among(blocks)) == len(blocks), f"some of {blocks} are not cached"
        evictable = self.pool.evictable
        self._policy.reuse([block for block in blocks if block in evictable])
        self.pool.retain(blocks)

    def allocate(self, count: int) -> list[BlockId]:
        """Take `count` blocks of no contents, evicting as many evictable ones as it takes."""
        assert count <= self.available_count, f"{count} blocks asked, {self.available_count} available"
        while (missing := count - self.pool.free_count) > 0:
            self._evict(missing if self._policy.keeps_unused else 1)
        return self.pool.allocate(count)

    def _evict(self, count: int) -> None:
        blocks = self._policy.evict(count)
        parent = self._index.parent(blocks[-1])
        self._note_ghosts(blocks)
        self._drop(blocks)
        self._evicted += count
        self._drop_unneeded(parent)  # without its end, what was kept for somebody is not

    def _note_ghosts(self, blocks: Iterable[BlockId]) -> None:
        """These blocks are about to go, and their snapshots."""
        for block_hash in map(self._index.hash_of, blocks):
            self.ghosts.on_block_removed(block_hash)
            states = self.states
            if states is not None and states.find(block_hash) is not None and not states.is_provisional(block_hash):
                self.ghosts.on_snapshot_removed_with_block(block_hash)

    def want(self, block_hash: BlockHash) -> None:
        """A waiting request is to find the block of `block_hash`, once it is computed, and all before it."""
        self._wanted[block_hash] = self._wanted.get(block_hash, 0) + 1

    def unwant(self, block_hash: BlockHash) -> None:
        """It is not waiting for that any more."""
        self._wanted[block_hash] -= 1
        if not self._wanted[block_hash]:
            del self._wanted[block_hash]
            self._drop_unneeded(self._index.find(block_hash))

    def wanted(self) -> dict[BlockHash, int]:
        """What is wanted, and by how many."""
        return dict(self._wanted)

    def _is_needed(self, block: BlockId) -> bool:
        """Whether a waiting request is to find the cached `block`, or one that continues it is there."""
        return self._index.hash_of(block) in self._wanted or self._index.children(block) > 0

    def _drop_unneeded(self, block: BlockId | None) -> None:
        """Drop `block` if it was kept for waiting requests only and none is left; then the one before it, and so on."""
        while block is not None and not self._policy.keeps_unused and block in self._policy:
            if self._is_needed(block):
                return
            parent = self._index.parent(block)
            self._policy.reuse([block])
            self._drop([block])
            block = parent

    def publish(
        self, block_hashes: Sequence[BlockHash], blocks: Sequence[BlockId], parent: BlockHash | None
    ) -> tuple[BlockId, ...]:
        """The contents of a run of blocks, which continues `parent`, have been computed: let others find them.

        Returns:
            The blocks to use from now on: each itself, or the one that has these contents already; then the caller's
            reference is to that one, and its own is released. Since an indexed block's parents are indexed, contents
            that are there already are those of the run's beginning.
        """
        known = list(self._index.longest_run(block_hashes))
        count = len(known)
        if known:
            swapped = [(own, other) for own, other in zip(blocks, known, strict=False) if own != other]
            self.pin([other for _, other in swapped])
            self.pool.release([own for own, _ in swapped])
            parent, block_hashes, blocks = block_hashes[count - 1], block_hashes[count:], blocks[count:]
        if block_hashes:
            self._index.add(block_hashes, blocks, parent)
            self.ghosts.on_blocks_stored(block_hashes)
        return (*known, *blocks)

    def release(self, table: Sequence[BlockId]) -> None:
        """Drop one reference to each block of a request's table; cached ones nobody uses then are the policy's."""
        unused = self.pool.let_go(reversed(table))
        kept = self._index.among(unused) if self._policy.keeps_unused else self._keep_needed(unused)
        self._policy.hold(kept)
        if len(kept) < len(unused):
            self.pool.free([block for block in unused if block not in self._index])

    def _keep_needed(self, unused: Iterable[BlockId]) -> list[BlockId]:
        """Of blocks that nobody uses, from the end of a sequence to its start, those to hold; others are forgotten."""
        kept = []
        for block in self._index.among(unused):
            if self._is_needed(block):
                kept.append(block)
            else:
                self._forget([block])
        return kept

    def _drop(self, blocks: Sequence[BlockId]) -> None:
        self._forget(blocks)
        self.pool.free(blocks)

    def _forget(self, blocks: Iterable[BlockId]) -> None:
        block_hashes = self._index.remove(blocks)
        if self.states is not None:
            for block_hash in block_hashes:
                self.states.drop(block_hash)
        if self.cached_token_ids is not None:
            for block_hash in block_hashes:
                self.cached_token_ids.drop(block_hash)
        if self.observer is not None:
            self.observer.on_blocks_removed(block_hashes)

    def reset(self) -> None:
        """Forget all contents: nothing cached before is matched after, and nothing begun before is published."""
        self.pool.free(list(self._policy))
        self._policy.clear()
        self._index.clear()
        if self.states is not None:
            self.states.clear()
        self.ghosts.clear()
        if self.cached_token_ids is not None:
            self.cached_token_ids.clear()
        if self.observer is not None:
            self.observer.on_cleared()
        self.epoch += 1

    def on_snapshot_stored(self, block_hash: BlockHash) -> None:
        """See `SnapshotListener`, as the next three."""
        self.ghosts.on_snapshot_stored(block_hash)
        if self.observer is not None:
            self.observer.on_snapshot_stored(block_hash)

    def on_snapshot_removed(self, block_hash: BlockHash) -> None:
        """Blocks may be weighed by their snapshots."""
        self._policy.on_snapshot_removed(block_hash)
        if self.observer is not None:
            self.observer.on_snapshot_removed(block_hash)

    def on_snapshot_displaced(self, block_hash: BlockHash) -> None:
        """More slots would have kept it."""
        self.ghosts.on_snapshot_removed(block_hash)

    def on_snapshot_replaced(self, block_hash: BlockHash) -> None:
        """More slots would not have kept it."""
        self.ghosts.on_snapshot_stored(block_hash)

    def releasable(self, tables: Iterable[Sequence[BlockId]]) -> set[BlockId]:
        """Blocks that would become available if these tables were released together."""
        counts: dict[BlockId, int] = {}
        for table in tables:
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        return {block for block, count in counts.items() if self.pool.references(block) == count}

    def note_divergence(self, matched: Sequence[BlockId], start: int) -> None:
        """A request that shares these blocks is about to resume behind `start` of them.

        It is noted if what is cached goes on otherwise from there, and nobody who asked for states had left any: then
        a snapshot that nobody asked for is what would help, or did.
        """
        if self.states is None or not matched or not self._index.children(matched[-1]):
            return
        if start < len(matched) or self.states.is_provisional(self._index.hash_of(matched[-1])):
            self.divergences.note(len(matched))

    def count_hit(self, block: BlockId) -> None:
        """A request has resumed at the end of `block`, or within it."""
        self._index.count_hit(block)

    def hottest(self, count: int) -> list[CachedPrefix]:
        """The prefixes that most requests resumed from, the hottest first."""
        return self._index.hottest(count)

    def use(self) -> CacheUse:
        """Numbers for people."""
        return CacheUse(
            blocks_total=self.pool.total,
            blocks_cached=len(self._index),
            blocks_evictable=len(self._policy),
            blocks_in_use=self.pool.total - self.available_count,
            blocks_evicted=self._evicted,
            **_slot_use(self.states or StateIndex(0)),
        )

    def check(self) -> None:
        """Assert that free, evictable and used blocks make up the pool, and that the index is a sound forest."""
        self.pool.check()
        self._index.check()
        if self.states is not None:
            self.states.check(self._index.block_hashes())
        snapshots = (
            set() if self.states is None else {one for one in self._index.block_hashes() if self.states.find(one)}
        )
        if self.cached_token_ids is not None:
            self.cached_token_ids.check(set(self._index.block_hashes()))
        self.ghosts.check(set(self._index.block_hashes()), snapshots)
        self._policy.check()
        evictable = set(self._policy)
        assert all(count > 0 for count in self._wanted.values()), "wanted by nobody"
        if not self._policy.keeps_unused:
            assert all(map(self._is_needed, evictable)), "a block is kept for nobody"
        assert evictable == self.pool.evictable, "the policy and the pool disagree on evictable blocks"
        assert evictable <= set(self._index), "an evictable block is not indexed"
        for block in self._index:
            assert block in evictable or self.pool.references(block) > 0, f"cached block {block} is free"
            parent = self._index.parent(block)
            assert parent is None or block in evictable or parent not in evictable, (
                f"block {block} outlives its parent's use"
            )


def _slot_use(states: StateIndex) -> dict[str, int]:
    return {
        "slots_total": states.total,
        "slots_used": states.used_count,
        "slots_evicted": states.evicted,
        "snapshots_taken": states.taken,
        "snapshots_skipped": states.skipped,
        "snapshots_replaced": states.replaced,
        "provisional_slots": states.used_provisional_count,
        "provisional_taken": states.opportunistic.taken,
        "provisional_consumed": states.opportunistic.consumed,
        "provisional_given_up": states.opportunistic.given_up,
    }
