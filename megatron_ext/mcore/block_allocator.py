"""Megatron's allocator interface over our pool, read-only: the counts that users and logs ask of a context."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ext.mcore.versions import BlockAllocator
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler


class PoolBlockAllocator(BlockAllocator):
    """Counts of `BlockAllocator`, answered from the scheduler on the host without a device read-back.

    Only the scheduler allocates blocks, so the methods that allocate or release raise.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.total_count = self.pool_size = scheduler.cache.pool.total + 1  # upstream counts the dummy block
        self.dummy_block_idx = scheduler.cache.pool.total
        self.paused_count = self.paused_limit = scheduler.limits.paused_blocks or 0
        self.active_count = scheduler.cache.pool.total

    @property
    def total_avail(self) -> int:
        """Number of blocks that could be allocated now: free blocks, and cached blocks without references."""
        return self._scheduler.cache.available_count

    @property
    def pool_avail(self) -> int:
        """Number of blocks that could be allocated now (0.20's name)."""
        return self.total_avail

    def get_allocatable_count(self) -> int:
        """Return the number of blocks that could be allocated now."""
        return self.total_avail

    def get_active_used(self) -> int:
        """Return the number of blocks in the tables of running requests."""
        return _distinct_blocks(self._scheduler.queues.running)

    def get_paused_used(self) -> int:
        """Return the number of blocks that paused requests keep."""
        return _distinct_blocks(self._scheduler.queues.paused)

    def allocate_memory_blocks(self, num_blocks: int) -> None:
        """Raise NotImplementedError; see `Scheduler`."""
        raise NotImplementedError("blocks are allocated by the scheduler")

    def release_memory_blocks(self, blocks: object) -> None:
        """Raise NotImplementedError; see `Scheduler`."""
        raise NotImplementedError("blocks are released by the scheduler")

    def reset(self) -> None:
        """Raise NotImplementedError; see `InferenceEngine.reset`."""
        raise NotImplementedError("the engine's reset() replaces the scheduler")


def _distinct_blocks(requests: Iterable[Request]) -> int:
    return len({block for request in requests for block in request.block_table})
