"""Megatron's allocator interface, read-only, over our pool: what users and logs ask a context's allocator for."""

from __future__ import annotations

from megatron.core.inference.contexts.dynamic_block_allocator import BlockAllocator

from megatron_ext.scheduling.scheduler import Scheduler


class PoolBlockAllocator(BlockAllocator):
    """Counts of `BlockAllocator`, answered from the scheduler on the host without a device read-back.

    Blocks are handed out by the scheduler alone, so the methods that allocate or release refuse.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.total_count = scheduler.blocks.total + 1  # upstream counts the dummy block
        self.dummy_block_idx = scheduler.blocks.total
        self.paused_count = scheduler.limits.paused_blocks or 0
        self.active_count = scheduler.blocks.total

    @property
    def total_avail(self) -> int:
        """Free blocks."""
        return self._scheduler.blocks.free_count

    def get_active_used(self) -> int:
        """Blocks in the tables of running requests."""
        return sum(len(request.block_table) for request in self._scheduler.queues.running)

    def get_paused_used(self) -> int:
        """Blocks that paused requests keep."""
        return sum(len(request.block_table) for request in self._scheduler.queues.paused)

    def allocate_memory_blocks(self, num_blocks: int) -> None:
        """Not here: see `Scheduler`."""
        raise NotImplementedError("blocks are allocated by the scheduler")

    def release_memory_blocks(self, blocks: object) -> None:
        """Not here: see `Scheduler`."""
        raise NotImplementedError("blocks are released by the scheduler")

    def reset(self) -> None:
        """Not here: see `InferenceEngine.reset`."""
        raise NotImplementedError("the engine's reset() replaces the scheduler")
