"""Bytes into blocks and live states, with errors that name the number that would do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config import BatchingConfig
from megatron_ext.errors import ConfigError

GIB = 1024**3
DEFAULT_BUFFER_GB = {"cpu": 1.0, "cuda": 40.0}
DEFAULT_MAX_TOKENS = {"cpu": 2048, "cuda": 16384}
HYBRID_BLOCK_MULTIPLE = 16


@dataclass(frozen=True)
class ModelMemory:
    """What one model needs per token and per request, on this rank."""

    kv_bytes_per_token: int  # all attention layers, key and value
    state_bytes: int  # all recurrent layers, one sequence
    chunk_size: int  # the model's scan chunk, tokens
    max_sequence_length: int


@dataclass(frozen=True)
class Geometry:
    """Effective sizes (EX-6), as printed at start-up and in the JSON output."""

    block_size_tokens: int
    block_bytes: int
    state_bytes: int
    state_in_kv_tokens: int | None  # tokens of KV that one state costs; None without attention
    blocks: int
    snapshot_slots: int
    live_states: int
    kernel_chunk: int
    shortest_prompt_that_can_hit: int | None  # None: nothing is cached

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pools: KV blocks with the dummy one, and live states."""
        return (self.blocks + 1) * self.block_bytes + self.live_states * self.state_bytes


def plan_memory(model: ModelMemory, batching: BatchingConfig, device_type: str, *, can_hit: bool) -> Geometry:
    """Sizes of the pools. The buffer holds KV blocks, and live states for `max_requests` requests.

    Args:
        model: What it needs per token and per request.
        batching: Budget and limits.
        device_type: "cpu" or "cuda", for the defaults.
        can_hit: Whether prompts can be served from cached blocks; the shortest one fills a block.

    Raises:
        ConfigError: The buffer cannot hold one block and the live states, or the block size does not suit recurrent
            layers.
    """
    block_size = batching.block_size
    if model.state_bytes and block_size % HYBRID_BLOCK_MULTIPLE:
        multiple = HYBRID_BLOCK_MULTIPLE
        fitting = max(multiple, round(block_size / multiple) * multiple)
        raise ConfigError(
            f"block size {block_size} is not a multiple of {multiple}, which recurrent layers need; {fitting} would do"
        )
    block_bytes = block_size * model.kv_bytes_per_token
    per_token = model.kv_bytes_per_token
    return Geometry(
        block_size_tokens=block_size,
        block_bytes=block_bytes,
        state_bytes=model.state_bytes,
        state_in_kv_tokens=math.ceil(model.state_bytes / per_token) if per_token else None,
        blocks=_block_count(model, batching, block_bytes, device_type),
        snapshot_slots=0,
        live_states=batching.max_requests if model.state_bytes else 0,
        kernel_chunk=largest_divisor(block_size, model.chunk_size),
        shortest_prompt_that_can_hit=block_size if can_hit else None,
    )


def _block_count(model: ModelMemory, batching: BatchingConfig, block_bytes: int, device_type: str) -> int:
    if batching.block_count is not None:
        return batching.block_count
    buffer_gb = DEFAULT_BUFFER_GB[device_type] if batching.buffer_size_gb is None else batching.buffer_size_gb
    live_bytes = batching.max_requests * model.state_bytes
    kv_bytes = int(buffer_gb * GIB) - live_bytes
    if kv_bytes < 2 * block_bytes:  # one is the dummy that padding points to
        hint = ", or fewer --inference-dynamic-batching-max-requests" if live_bytes else ""
        raise ConfigError(
            f"a buffer of {buffer_gb:g} GB is too small for {live_bytes} bytes of live states ({batching.max_requests} "
            f"requests) and {2 * block_bytes} bytes of KV (one block and the dummy block); "
            f"{_gigabytes(live_bytes + 2 * block_bytes)} GB would do{hint}"
        )
    if block_bytes == 0:  # no attention: blocks are bookkeeping only, so there are enough
        return batching.max_requests * math.ceil(model.max_sequence_length / batching.block_size)
    return kv_bytes // block_bytes - 1


def check_fits(geometry: Geometry, available_bytes: int) -> None:
    """See that the pools fit the memory there is, before they are allocated.

    Raises:
        ConfigError: They do not.
    """
    if geometry.pool_bytes > available_bytes:
        raise ConfigError(
            f"KV blocks and live states need {_gigabytes(geometry.pool_bytes)} GB, and {available_bytes / GIB:.1f} GB "
            "of memory are free; give a smaller --inference-dynamic-batching-buffer-size-gb or -block-count"
        )


def _gigabytes(count: int) -> str:
    """`count` bytes in GB, rounded up, so that the number is enough when it is given back."""
    return f"{math.ceil(count / GIB * 1e6) / 1e6:.6f}".rstrip("0").rstrip(".")


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit` (HY-12)."""
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)
