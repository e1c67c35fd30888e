"""Hinted order of cached entries: which entry of a tenant goes when the eviction policy has chosen the tenant.

An eviction order gives every entry a *place*. The place that comes first says which tenant (cache salt) loses an entry;
`Hints` says which of the tenant's entries goes, and the entry that was to go takes the place of that one. So hints
reorder entries of one tenant only, and tenants lose entries in the order without hints.

Blocks of a tenant go in this order, the least recently used first in each group, and always leaves:

1. *spent* ones: of sessions that have ended, and of prompts that were replaced;
2. the others, without those of sessions that pause;
3. those of sessions that pause; if a tenant has no other block, its pauses count no more.

Snapshots go in the same order. Spent, too, are a session's snapshots once its next request has resumed, which leaves a
newer one; they still serve it if that one is lost with its block, so the one goes first that is closest to the one
before it. A request that uses a spent entry makes it an ordinary one.

A session owns the blocks that its newest prompt alone uses: a run at the end of the prompt. What another request
matches, or continues, belongs to all. Time is that of the requests' submission, so ranks agree (see `Hints.tick`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from megatron_ext.config.cache_hints import CacheHints
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.sessions import Session, Tenant
from megatron_ext.prefix_cache.snapshot_order import SnapshotOrder
from megatron_ext.prefix_cache.snapshot_owners import SnapshotOwners

MAX_SESSIONS = 4096  # remembered; the least recently used is forgotten first, and its entries belong to all


class Hints:
    """Sessions, the owners of cached entries, and the choice of the entry that goes.

    Args:
        index: Index of the cached blocks.
    """

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._now = -math.inf
        self._tenants: dict[str | None, Tenant] = {}
        self._sessions: OrderedDict[tuple[str | None, str], Session] = OrderedDict()
        self._owners: dict[BlockId, Session] = {}
        self._snapshots = SnapshotOwners(index)
        self._pausing: list[Session] = []  # of which the time is not known from which they pause

    def tick(self, now: float) -> None:
        """Advance the time, in seconds, to that of a request's submission; pauses count from the first one after."""
        self._now = max(self._now, now)
        for session in self._pausing:
            session.until = self._now + session.pause if session.pause else -math.inf
        self._pausing = []

    def end_sessions(self, salt: str | None, names: Iterable[str]) -> None:
        """End sessions of a tenant, and those that they have started: what they own is spent."""
        ending = set(names)
        while ending:
            for name in sorted(ending):
                self._end(self._sessions.get((salt, name)))
            ending = {
                name
                for (of, name), one in self._sessions.items()
                if of == salt and one.parent in ending and name not in ending
            }

    def admit(
        self, request_id: int, salt: str | None, hints: CacheHints | None, matched: Sequence[BlockId], depth: int
    ) -> None:
        """Take note of an admitted request.

        Args:
            request_id: Id of the request.
            salt: Cache salt of the request.
            hints: Hints of the request.
            matched: The cached blocks that it uses, all in use.
            depth: Number of blocks up to the snapshot that it resumes from; 0 without one.
        """
        if matched and matched[-1] not in self._owners:
            self._adopt(salt, matched)
        session = self._session(salt, hints)
        owner = self._owners[matched[-1]] if matched else None
        if owner is not None and owner is not session:
            self._share(owner, len(matched))
        if depth:
            self._snapshots.use(self._index.hash_of(matched[depth - 1]), session)
        if session is not None and hints is not None:
            self._continue(session, request_id, hints, matched)
        if hints is not None and hints.replaces is not None and hints.replaces != hints.session:
            self._end(self._sessions.get((salt, hints.replaces)))

    def publish(
        self, request_id: int | None, salt: str | None, hints: CacheHints | None, table: Sequence[BlockId], known: int
    ) -> None:
        """Take note of a request's published blocks.

        Args:
            request_id: Id of the request; None for blocks that no request has computed.
            salt: Cache salt of the request.
            hints: Hints of the request.
            table: Published blocks of the request, from its start.
            known: Number of them that were cached before.
        """
        if known and table[known - 1] not in self._owners:
            self._adopt(salt, table[:known])
        new = table[known:]
        session = None if hints is None or hints.session is None else self._sessions.get((salt, hints.session))
        if session is not None and session.current != request_id:
            session = None
        before = self._owners[table[known - 1]] if known else None
        if before is not None and (before is not session or session.end != known):
            self._share(before, known)
        if session is not None:
            if session.end != known:
                self._release(session, 0)
                session.start = known
            session.run += new
        if not new:
            return
        tenant = self._tenant(salt)
        self._owners.update(dict.fromkeys(new, session or tenant.everyone))
        tenant.blocks += len(new)

    def end(self, request_id: int, salt: str | None, hints: CacheHints | None) -> None:
        """Take note of the end of a request, whose blocks are released."""
        tenant = self._tenants.get(salt)
        if tenant is not None:
            self._snapshots.retry(tenant)
        if hints is None or hints.session is None:
            return
        session = self._sessions.get((salt, hints.session))
        if session is None or session.current != request_id:
            return
        if hints.ends_session:
            self.end_sessions(salt, [hints.session])
        elif hints.pause_seconds is not None:
            session.pause, session.until = hints.pause_seconds, math.inf
            self._pausing.append(session)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Take note of blocks that have become evictable."""
        owners = self._owners
        for block in blocks:
            owner = owners.get(block)
            if owner is not None:
                owner.tenant.others.put(block)

    def reuse(self, blocks: Iterable[BlockId]) -> None:
        """Take note of evictable blocks that are in use again."""
        owners = self._owners
        for block in blocks:
            owner = owners.get(block)
            if owner is None:
                continue
            if block in owner.tenant.spent:  # what was replaced is used after all, and so is the prompt before it
                self._share_before(block)
            owner.tenant.discard(block)

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Take note of blocks that are no longer cached."""
        for block in blocks:
            owner = self._owners.pop(block, None)
            if owner is None:
                continue
            owner.tenant.discard(block)
            if owner.run and owner.run[-1] == block:
                owner.run.pop()
            owner.tenant.blocks -= 1
            self._drop_tenant(owner.tenant)

    def move(self, old: BlockId, new: BlockId) -> None:
        """Take note that the contents of the block `old` are in `new` now, also in the index."""
        owner = self._owners.pop(old, None)
        if owner is None:
            return
        self._owners[new] = owner
        owner.tenant.rename(old, new)
        if owner.run:
            owner.run[self._index.depth(self._index.hash_of(new)) - owner.start - 1] = new

    def store_snapshot(self, block_hash: BlockHash) -> None:
        """Take note of a visible snapshot, which supersedes earlier ones of its session."""
        block = self._index.find(block_hash)
        owner = None if block is None else self._owners.get(block)
        if owner is None or owner.name is None:
            return
        self._snapshots.store(block_hash, owner)

    def forget_snapshot(self, block_hash: BlockHash) -> None:
        """Take note of a snapshot that is gone."""
        self._snapshots.forget(block_hash)

    def clear(self) -> None:
        """Forget all entries and sessions; the cache is empty."""
        for table in (self._tenants, self._sessions, self._owners, self._snapshots):
            table.clear()
        self._pausing.clear()

    def choose_block(self, victim: BlockId) -> BlockId:
        """Return the evictable leaf that goes in place of `victim`, of the same tenant."""
        owner = self._owners.get(victim)
        if owner is None:
            return victim
        tenant, index = owner.tenant, self._index
        if tenant.spent:
            return next(iter(tenant.spent))
        others = tenant.others
        for _ in range(len(others)):
            block = next(iter(others))
            if not index.children(block) and self._owners[block].until <= self._now:
                return block
            others.put(block)
        for session in self._sessions.values():
            if session.tenant is tenant:
                session.until, session.pause = -math.inf, 0.0
        return next(block for block in others if not index.children(block))

    def choose_snapshot(
        self, victim: BlockHash, order: SnapshotOrder, may_go: Callable[[BlockHash], bool] = bool
    ) -> BlockHash:
        """Return the snapshot of `order` that goes in place of `victim`, of the same tenant, if it may go."""
        tenant = self._tenant_of(victim)
        if tenant is None:
            return victim
        # Opportunistic ones, which are not in `order`, go before all others, by an order of their own.
        spent = self._snapshots.first_spent(tenant, lambda one: order.rank(one) is not None and may_go(one))
        if spent is not None or not self._is_pausing(victim):
            return spent or victim
        rest = (one for one in order if self._tenant_of(one) is tenant and not self._is_pausing(one) and may_go(one))
        return next(rest, victim)

    def spent_snapshot(
        self, victim: BlockId, may_go: Callable[[BlockHash], bool], max_gap: float = math.inf
    ) -> BlockHash | None:
        """Return the snapshot that the tenant of a block gives up before it; see `SnapshotOwners.first_spent`."""
        owner = self._owners.get(victim)
        return None if owner is None else self._snapshots.first_spent(owner.tenant, may_go, max_gap)

    def check(self, evictable: Iterable[BlockId], snapshots: Iterable[BlockHash]) -> None:
        """Assert that owners, queues and runs agree with the cache.

        Args:
            evictable: All evictable blocks.
            snapshots: All visible snapshots.
        """
        cached, owned, index = set(evictable), set(self._owners), self._index
        queued = [block for one in self._tenants.values() for block in (*one.spent, *one.others)]
        assert sorted(queued) == sorted(cached & owned), "a block is in no queue, or in two"
        assert owned <= set(index), "a block is owned that is not cached"
        self._snapshots.check(snapshots, self._sessions.values())
        for session in self._sessions.values():
            assert all(self._owners[block] is session for block in session.run), "a run of other owners' blocks"
            session.check(index)
        for tenant in self._tenants.values():
            assert tenant.blocks == sum(one.tenant is tenant for one in self._owners.values()), "blocks miscounted"
            assert tenant.sessions == sum(one.tenant is tenant for one in self._sessions.values())
            tenant.check(index)

    def _tenant(self, salt: str | None) -> Tenant:
        tenant = self._tenants.get(salt)
        if tenant is None:
            tenant = self._tenants[salt] = Tenant(salt)
        return tenant

    def _drop_tenant(self, tenant: Tenant) -> None:
        if not tenant.blocks and not tenant.sessions:
            self._tenants.pop(tenant.salt, None)

    def _session(self, salt: str | None, hints: CacheHints | None) -> Session | None:
        """Return the session of a request, a new one if it is unknown; None without one."""
        if hints is None or hints.session is None:
            return None
        key = salt, hints.session
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(self._tenant(salt), hints.session, hints.parent_session)
            session.tenant.sessions += 1
            if len(self._sessions) > MAX_SESSIONS:
                self._drop_session(next(iter(self._sessions.values())))
        self._sessions.move_to_end(key)
        return session

    def _drop_session(self, session: Session) -> None:
        """Forget a session; what it owns belongs to all."""
        self._release(session, 0)
        self._snapshots.disown_others(session, (), is_spent=False)
        tenant = session.tenant
        assert session.name is not None, "it has been in the table"
        del self._sessions[tenant.salt, session.name]
        tenant.sessions -= 1
        self._drop_tenant(tenant)

    def _end(self, session: Session | None) -> None:
        """End a session: what it owns is spent."""
        if session is not None:
            self._spend(session, 0)
            self._snapshots.disown_others(session, (), is_spent=True)
            self._drop_session(session)

    def _continue(self, session: Session, request_id: int, hints: CacheHints, matched: Sequence[BlockId]) -> None:
        """Let a request be the newest one of its session, unless it is a retry."""
        is_later = hints.turn is not None and session.turn is not None and hints.turn > session.turn
        if hints.turn is not None and session.turn is not None and not is_later and session.current != request_id:
            return
        session.turn, session.current = hints.turn if hints.turn is not None else session.turn, request_id
        session.pause, session.until = 0.0, -math.inf
        used = set(matched)
        keep = sum(block in used for block in session.run)
        is_replaced = is_later or hints.replaces == session.name
        if is_replaced:
            self._spend(session, keep)
        elif keep < len(session.run):  # several conversations: what they have in common belongs to all
            self._release(session, 0)
            used.clear()
        self._snapshots.disown_others(session, used, is_spent=is_replaced)
        if not session.run:
            session.start = len(matched)
        self._snapshots.supersede(session, len(matched) + 1)

    def _spend(self, session: Session, keep: int) -> None:
        """Make the blocks of a session's run after the first `keep` spent, and let them belong to all.

        A request of the session may use some of them still: those, and the blocks before them, become ordinary ones.
        """
        tenant, spent = session.tenant, session.run[keep:]
        for block in reversed(spent):
            if block in tenant.others:
                tenant.others.discard(block)
                tenant.spent.put(block)
        self._release(session, keep if not spent or spent[0] in tenant.spent else 0)

    def _release(self, session: Session, keep: int) -> None:
        """Let the blocks of a session's run after the first `keep` belong to all."""
        self._owners.update(dict.fromkeys(session.run[keep:], session.tenant.everyone))
        del session.run[keep:]

    def _share(self, owner: Session, depth: int) -> None:
        """Let the blocks of a session up to `depth` belong to all, since another request uses them."""
        count = min(max(0, depth - owner.start), len(owner.run))
        self._owners.update(dict.fromkeys(owner.run[:count], owner.tenant.everyone))
        del owner.run[:count]
        owner.start += count

    def _share_before(self, block: BlockId) -> None:
        parent = self._index.parent(block)
        if parent is not None:
            self._share(self._owners[parent], self._index.depth(self._index.hash_of(parent)))

    def _adopt(self, salt: str | None, table: Sequence[BlockId]) -> None:
        """Let blocks in use that were cached before the first hint belong to all of their tenant."""
        tenant = self._tenant(salt)
        unknown = [block for block in table if block not in self._owners]
        self._owners.update(dict.fromkeys(unknown, tenant.everyone))
        tenant.blocks += len(unknown)

    def _tenant_of(self, block_hash: BlockHash) -> Tenant | None:
        block = self._index.find(block_hash)
        owner = None if block is None else self._owners.get(block)
        return None if owner is None else owner.tenant

    def _is_pausing(self, block_hash: BlockHash) -> bool:
        return self._snapshots.is_pausing(block_hash, self._now)
