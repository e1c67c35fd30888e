"""Settings that would fit the memory there is: the numbers in the errors about those that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.errors import ConfigError
from megatron_ext.memory.budget import KVCacheConfig, ModelMemory, check_fits, plan_memory

# Of what is free. The rest is for what a step computes with, and for what allocators round up.
SUGGESTED_SHARE = 0.8
_BATCHING = "--inference-dynamic-batching"
_HUNDREDTHS = 100  # of a GB, the steps in which sizes are suggested


def plan_within(
    model: ModelMemory, batching: BatchingConfig, cache: CacheConfig, device_type: str, available_bytes: int
) -> KVCacheConfig:
    """As `plan_memory`, for pools that must fit the memory there is.

    Raises:
        ConfigError: As `plan_memory`; or they do not fit, with a number that would do.
    """
    geometry = plan_memory(model, batching, cache, device_type)
    if geometry.pool_bytes > available_bytes:
        check_fits(geometry, available_bytes, what_fits(model, batching, cache, device_type, available_bytes))
    return geometry


def what_fits(
    model: ModelMemory, batching: BatchingConfig, cache: CacheConfig, device_type: str, available_bytes: int
) -> str:
    """The setting to give instead, and its largest value that leaves some memory; the first of these that helps.

    Blocks or the buffer, whichever the settings speak of; then snapshots; then requests.
    """
    limit = int(available_bytes * SUGGESTED_SHARE)

    def size(new_batching: BatchingConfig, new_cache: CacheConfig = cache) -> int:
        """Bytes of the pools; 0 for settings that cannot be, which are too small."""
        try:
            return plan_memory(model, new_batching, new_cache, device_type).pool_bytes
        except ConfigError:
            return 0

    if batching.block_count is not None:
        most = _largest(batching.block_count, limit, lambda n: size(dataclasses.replace(batching, block_count=n)))
        if most:
            return f"{_BATCHING}-block-count {most} would do"
    else:
        buffer = batching.buffer_gb_on(device_type)
        most = _largest(
            int(buffer * _HUNDREDTHS),
            limit,
            lambda n: size(dataclasses.replace(batching, buffer_size_gb=n / _HUNDREDTHS)),
        )
        if most:
            return f"{_BATCHING}-buffer-size-gb {most / _HUNDREDTHS:g} would do"
    return _beside_the_blocks(batching, cache, limit, size)


def largest_allocation(device: torch.device, start: int) -> int:
    """Bytes that can be allocated in one go, found by trying: at least half of the most that is possible.

    Args:
        device: Where.
        start: The most that is tried.
    """
    count = start
    while count > 0:
        try:
            torch.empty(count, dtype=torch.uint8, device=device)
            break
        except RuntimeError:  # torch.OutOfMemoryError on CUDA is one
            count //= 2
    return count


def _beside_the_blocks(
    batching: BatchingConfig, cache: CacheConfig, limit: int, size: Callable[[BatchingConfig, CacheConfig], int]
) -> str:
    """Where even the fewest blocks do not fit beside live states and snapshots."""
    least = dataclasses.replace(batching, block_count=1, buffer_size_gb=None)
    none = dataclasses.replace(cache, snapshot_buffer_gb=None, snapshot_slots=0)
    one_block = f"{_BATCHING}-block-count 1 at least, and"
    if size(least, none) <= limit:
        slots = _largest(
            cache.snapshot_slots or batching.effective_max_requests,
            limit,
            lambda n: size(least, dataclasses.replace(none, snapshot_slots=n)),
        )
        return f"{one_block} {_BATCHING}-prefix-caching-mamba-slots {slots} would do"
    most = _largest(
        batching.effective_max_requests, limit, lambda n: size(dataclasses.replace(least, max_requests=n), none)
    )
    if most:
        without = f"{_BATCHING}-prefix-caching-mamba-slots 0"
        return f"{one_block} {without} with {_BATCHING}-max-requests {most} would do"
    return "not even one request fits: free some memory, or take a smaller model"


def _largest(start: int, limit: int, size: Callable[[int], int]) -> int:
    """The largest number up to `start` whose size is within the limit; 0 if none is.

    Args:
        start: Where to begin.
        limit: The most bytes.
        size: Bytes that a number takes, growing with it; 0 of one that cannot be.
    """
    low, high = 0, start + 1  # of these the first is within the limit, the second is not looked at
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low if low and size(low) else 0
