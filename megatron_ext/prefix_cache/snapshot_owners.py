"""Owners of snapshots: which sessions took them, and which of them are spent; `Hints` keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.sessions import Session, Tenant


class SnapshotOwners:
    """Snapshots of sessions; the spent ones of a tenant go first, the closest to the one before it first of all.

    Args:
        index: Index of the cached blocks.
    """

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._owners: dict[BlockHash, Session] = {}

    def store(self, block_hash: BlockHash, owner: Session) -> None:
        """Take note of a session's visible snapshot, which supersedes earlier ones of the session."""
        depth = self._index.depth(block_hash)
        owner.snapshots[block_hash] = depth
        self._owners[block_hash] = owner
        self.supersede(owner, depth)

    def forget(self, block_hash: BlockHash) -> None:
        """Take note of a snapshot that is gone."""
        owner = self._owners.pop(block_hash, None)
        if owner is not None:
            owner.snapshots.pop(block_hash, None)
            owner.tenant.keep_snapshot(block_hash)

    def use(self, block_hash: BlockHash, session: Session | None) -> None:
        """Take note that a request of a session, or of none, resumes from a snapshot."""
        owner = self._owners.get(block_hash)
        if owner is None:
            return
        owner.tenant.keep_snapshot(block_hash)
        if owner is not session:
            del self._owners[block_hash], owner.snapshots[block_hash]

    def supersede(self, session: Session, depth: int) -> None:
        """Make the snapshots of a session before `depth` spent."""
        tenant = session.tenant
        for block_hash, at in session.snapshots.items():
            if at < depth and not tenant.is_spent(block_hash):
                tenant.spent_snapshots.put(block_hash, self._gap(block_hash))

    def disown_others(self, session: Session, blocks: Collection[BlockId], *, is_spent: bool) -> None:
        """Let the snapshots of a session belong to all, and be the first to go if they are spent.

        Args:
            session: The session.
            blocks: Blocks whose snapshots it keeps.
            is_spent: Whether the others are spent.
        """
        everyone = session.tenant.everyone
        for block_hash in [one for one in session.snapshots if self._index.find(one) not in blocks]:
            self._owners[block_hash] = everyone
            everyone.snapshots[block_hash] = session.snapshots.pop(block_hash)
            if is_spent:
                session.tenant.spent_snapshots.put(block_hash, self._gap(block_hash))

    def retry(self, tenant: Tenant) -> None:
        """Consider the tenant's spent snapshots again that could not go when they came up."""
        for block_hash in tenant.passed_snapshots:
            tenant.spent_snapshots.put(block_hash, self._gap(block_hash))
        tenant.passed_snapshots.clear()

    def first_spent(
        self, tenant: Tenant, may_go: Callable[[BlockHash], bool], max_gap: float = math.inf
    ) -> BlockHash | None:
        """Return the spent snapshot of a tenant that goes first; None if none may go.

        Args:
            tenant: The tenant.
            may_go: Function that says whether a snapshot may go now.
            max_gap: Blocks after the snapshot before it; one with more stays.
        """
        spent = tenant.spent_snapshots
        while len(spent):
            block_hash, gap = spent.first(self._gap)
            if gap > max_gap:
                return None
            if may_go(block_hash):
                return block_hash
            spent.discard(block_hash)
            tenant.passed_snapshots[block_hash] = None
        return None

    def is_pausing(self, block_hash: BlockHash, now: float) -> bool:
        """Return whether a snapshot is of a session that pauses."""
        owner = self._owners.get(block_hash)
        return owner is not None and owner.until > now

    def clear(self) -> None:
        """Forget all snapshots."""
        self._owners.clear()

    def check(self, snapshots: Iterable[BlockHash], sessions: Iterable[Session]) -> None:
        """Assert that owners agree with the cache and with the sessions.

        Args:
            snapshots: All visible snapshots.
            sessions: All sessions.
        """
        assert self._owners.keys() <= set(snapshots), "a snapshot is owned that is gone"
        for session in sessions:
            assert all(self._owners[one] is session for one in session.snapshots)
        for block_hash, owner in self._owners.items():
            assert block_hash in owner.snapshots, "a snapshot is not its owner's"

    def _gap(self, block_hash: BlockHash) -> float:
        return self._owners[block_hash].gap(block_hash)
