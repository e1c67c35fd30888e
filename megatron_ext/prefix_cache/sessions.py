"""Sessions and tenants as owners of cached entries; `Hints` keeps them."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise

from megatron_ext.prefix_cache.aged_queue import AgedQueue
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash


class BlockQueue:
    """Blocks in the order in which they were put last; another block may take the place of one."""

    def __init__(self) -> None:
        self._times: dict[BlockId, int] = {}
        self._queue: OrderedDict[int, BlockId] = OrderedDict()  # by time
        self._clock = count()

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._times

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._queue.values())

    def put(self, block: BlockId) -> None:
        """Insert a block at the end, or move it there."""
        self.discard(block)
        time = self._times[block] = next(self._clock)
        self._queue[time] = block

    def discard(self, block: BlockId) -> None:
        """Remove a block if it is in the queue."""
        time = self._times.pop(block, None)
        if time is not None:
            del self._queue[time]

    def rename(self, old: BlockId, new: BlockId) -> None:
        """Put `new` in the place of `old`."""
        time = self._times[new] = self._times.pop(old)
        self._queue[time] = new


@dataclass(eq=False)
class Tenant:
    """Tenant with blocks in the cache; evictable ones are in one of the two queues.

    Attributes:
        salt: Cache salt.
        blocks: Number of its cached blocks.
        sessions: Number of its sessions.
        spent: Spent blocks.
        others: Other evictable blocks, the least recently used first; pausing ones are moved when they come up.
        spent_snapshots: Spent snapshots, by the blocks that must be computed again if another one before is used.
        passed_snapshots: Spent snapshots that could not go when they came up; considered again later.
        everyone: Owner of the blocks that belong to no session.
    """

    salt: str | None
    blocks: int = 0
    sessions: int = 0
    spent: BlockQueue = field(default_factory=BlockQueue)
    others: BlockQueue = field(default_factory=BlockQueue)
    spent_snapshots: AgedQueue[BlockHash] = field(default_factory=AgedQueue)
    passed_snapshots: dict[BlockHash, None] = field(default_factory=dict)
    everyone: Session = field(init=False)

    def __post_init__(self) -> None:
        self.everyone = Session(self, None)

    def discard(self, block: BlockId) -> None:
        """Remove a block from its queue, if it is in one."""
        self.others.discard(block)
        self.spent.discard(block)

    def is_spent(self, block_hash: BlockHash) -> bool:
        """Return whether a snapshot is spent."""
        return block_hash in self.spent_snapshots or block_hash in self.passed_snapshots

    def keep_snapshot(self, block_hash: BlockHash) -> None:
        """Make a snapshot an ordinary one, if it was spent."""
        self.spent_snapshots.discard(block_hash)
        self.passed_snapshots.pop(block_hash, None)

    def rename(self, old: BlockId, new: BlockId) -> None:
        """Put `new` in the place of `old`, if that is in a queue."""
        for queue in (self.others, self.spent):
            if old in queue:
                queue.rename(old, new)

    def check(self, index: BlockIndex) -> None:
        """Assert that a spent block goes after its children."""
        before: list[BlockId] = []
        for block in self.spent:
            above = sum(index.parent(one) == block for one in before)
            assert index.children(block) == above, "a spent block outlives an ordinary child"
            before.append(block)


@dataclass(eq=False)
class Session:
    """Owner of blocks and snapshots.

    Attributes:
        tenant: Tenant whose cache salt it has.
        name: Id; None for the owner of what belongs to all requests of the tenant.
        parent: Id of the session that started it.
        turn: Highest turn so far.
        current: Request id of the newest request, which continues the session.
        start: Depth in blocks at which its own run begins.
        run: Blocks of its own, in order; the last ones may be evicted.
        snapshots: Snapshots of its own, with their depths.
        pause: Seconds for which it pauses, until the time is known from which they count.
        until: Time until which it pauses; -inf for a session that does not.
    """

    tenant: Tenant
    name: str | None
    parent: str | None = None
    turn: int | None = None
    current: int | None = None
    start: int = 0
    run: list[BlockId] = field(default_factory=list)
    snapshots: dict[BlockHash, int] = field(default_factory=dict)
    pause: float = 0.0
    until: float = -math.inf

    @property
    def end(self) -> int:
        """Depth at which its run ends."""
        return self.start + len(self.run)

    def gap(self, block_hash: BlockHash) -> float:
        """Return the blocks between a snapshot and the one before it; -1 for one that belongs to all."""
        if self.name is None:
            return -1.0
        depth = self.snapshots[block_hash]
        return depth - max((other for other in self.snapshots.values() if other < depth), default=0)

    def check(self, index: BlockIndex) -> None:
        """Assert that each block of the run is the parent of the next, and otherwise of spent ones only."""
        depths = [index.depth(index.hash_of(block)) for block in self.run]
        assert depths == list(range(self.start + 1, self.end + 1)), "a run has a hole"
        assert all(index.parent(child) == block for block, child in pairwise(self.run)), "a run is of two prompts"
        spent = Counter(map(index.parent, self.tenant.spent))
        assert all(index.children(block) - spent[block] == (block != self.run[-1]) for block in self.run), (
            "another prompt uses a run"
        )
