"""Settings that would fit the available memory, for the errors about settings that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.errors import ConfigError
from megatron_ext.memory.budget import GIB, KVCacheConfig, ModelMemory, described_needs, plan_memory

# Share of the free memory, without the counted temporary tensors of a step. The rest is for what allocators lose.
SUGGESTED_SHARE = 0.8
_BATCHING = "--inference-dynamic-batching"
_HUNDREDTHS = 100  # of a GB: granularity of suggested sizes


def plan_within(
    model: ModelMemory, batching: BatchingConfig, cache: CacheConfig, device_type: str, available_bytes: int
) -> KVCacheConfig:
    """Plan the pools as `plan_memory` does, and check that they fit the available memory, before any allocation.

    Raises:
        ConfigError: As for `plan_memory`; or the pools do not fit: the error names a setting that would.
    """
    geometry = plan_memory(model, batching, cache, device_type)
    if geometry.pool_bytes + model.activation_bytes > available_bytes:
        advice = advice_that_fits(model, batching, cache, device_type, available_bytes)
        raise ConfigError(
            f"{described_needs(geometry, model.activation_bytes)}, and {available_bytes / GIB:.2f} GB of memory are "
            f"free for this process; {advice}"
        )
    return geometry


def advice_that_fits(
    model: ModelMemory, batching: BatchingConfig, cache: CacheConfig, device_type: str, available_bytes: int
) -> str:
    """Return advice for settings that do not fit: the first setting that helps, with its largest value that fits.

    The order is: the number of blocks or the buffer, whichever is set; then snapshots; then requests.
    """
    limit = int((available_bytes - model.activation_bytes) * SUGGESTED_SHARE)

    def size(new_batching: BatchingConfig, new_cache: CacheConfig = cache) -> int:
        """Return the bytes of the pools; 0 for invalid settings, which are too small."""
        try:
            return plan_memory(model, new_batching, new_cache, device_type).pool_bytes
        except ConfigError:
            return 0

    if batching.block_count is not None:
        largest = _largest(batching.block_count, limit, lambda n: size(dataclasses.replace(batching, block_count=n)))
        if largest:
            return f"give {_BATCHING}-block-count {largest}"
    else:
        buffer = batching.buffer_gb_on(device_type)
        largest = _largest(
            int(buffer * _HUNDREDTHS),
            limit,
            lambda n: size(dataclasses.replace(batching, buffer_size_gb=n / _HUNDREDTHS)),
        )
        if largest:
            return f"give {_BATCHING}-buffer-size-gb {largest / _HUNDREDTHS:g}"
    return _beside_the_blocks(batching, cache, limit, size)


def largest_allocation(device: torch.device, start: int) -> int:
    """Return the bytes that one allocation can get, found by trial: at least half of the maximum.

    Args:
        device: Device to allocate on.
        start: Bytes of the first, largest trial.
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
    """Return advice if even one block does not fit together with the running states and snapshots."""
    smallest = dataclasses.replace(batching, block_count=1, buffer_size_gb=None)
    none = dataclasses.replace(cache, snapshot_buffer_gb=None, snapshot_slots=0)
    one_block = f"give {_BATCHING}-block-count 1 and"
    if size(smallest, none) <= limit:
        slots = _largest(
            cache.snapshot_slots or batching.effective_max_requests,
            limit,
            lambda n: size(smallest, dataclasses.replace(none, snapshot_slots=n)),
        )
        return f"{one_block} {_BATCHING}-prefix-caching-mamba-slots {slots}"
    largest = _largest(
        batching.effective_max_requests, limit, lambda n: size(dataclasses.replace(smallest, max_requests=n), none)
    )
    if largest:
        without = f"{_BATCHING}-prefix-caching-mamba-slots 0"
        return f"{one_block} {without} with {_BATCHING}-max-requests {largest}"
    return (
        "not even one request fits: free some memory, use a smaller model, or fewer tokens in a step "
        f"({_BATCHING}-max-tokens)"
    )


def _largest(start: int, limit: int, size: Callable[[int], int]) -> int:
    """Return the largest number up to `start` whose size is within the limit; 0 if there is no such number.

    Args:
        start: Upper bound of the search.
        limit: Maximum bytes.
        size: Function from a number to its bytes, monotonic; 0 for an invalid number.
    """
    low, high = 0, start + 1  # `low` is within the limit; `high` is over it, or not to be tried
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low if low and size(low) else 0
