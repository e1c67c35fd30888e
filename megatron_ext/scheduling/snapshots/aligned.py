"""Limits required by `align` mode, which takes snapshots only at the ends of prefill chunks."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.plan import SchedulerLimits

_MODE = "--inference-dynamic-batching-prefix-caching-mamba-mode align"
_MAX_TOKENS = "--inference-dynamic-batching-max-tokens"
_MAX_REQUESTS = "--inference-dynamic-batching-max-requests"


def check_aligned(limits: SchedulerLimits) -> None:
    """Check that prefill chunks can end on the block grid (LA-3).

    Raises:
        ConfigError: Prefill chunks cannot end on the block grid.
    """
    if not limits.chunked_prefill:
        raise ConfigError(
            f"{_MODE} splits prompts into chunks, which --no-enable-chunked-prefill forbids; drop one of them"
        )
    if limits.max_tokens < limits.block_size:
        raise ConfigError(
            f"{_MODE} computes a block of {limits.block_size} tokens in a step; {_MAX_TOKENS} {limits.max_tokens} "
            f"must be at least {limits.block_size}"
        )


def describe_tight_budget(limits: SchedulerLimits) -> str | None:
    """Describe a token budget that may not fit a block and decodes, its cost and a remedy (LA-1); None if it does."""
    enough = limits.block_size + limits.max_requests
    if limits.max_tokens >= enough:
        return None
    return (
        f"{_MODE}: {_MAX_TOKENS} {limits.max_tokens} is less than a block of {limits.block_size} tokens and "
        f"{_MAX_REQUESTS} {limits.max_requests} together: beside decodes prefill chunks may end inside a block, "
        f"and prompts take more steps; give {enough}"
    )
