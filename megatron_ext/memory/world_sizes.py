"""The pools of several ranks, as people are told of them: together, and rank by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_ext.memory.budget import KVCacheConfig


@dataclass(frozen=True)
class RankKVCacheConfig:
    """What of a replica's blocks and states lies on one rank, and the bytes of all its pools."""

    rank: int
    block_bytes: int
    state_bytes: int
    pool_bytes: int


@dataclass(frozen=True)
class WorldKVCacheConfig(KVCacheConfig):
    """A replica's blocks and states over all its ranks, and how many bytes that is where.

    Numbers of blocks, slots and live states are those of one replica, and of each of its ranks that has such layers.
    """

    replicas: int
    world_pool_bytes: int  # of all ranks
    ranks: tuple[RankKVCacheConfig, ...]


def world_kv_cache_config(ranks: Sequence[KVCacheConfig], replica: Sequence[int]) -> KVCacheConfig:
    """What `ranks` have together; the geometry itself for a world of one.

    Args:
        ranks: By rank; they have agreed (see `memory.agreement`).
        replica: The ranks of one replica. The others are as many each, and have the same layers.
    """
    if len(ranks) == 1:
        return ranks[0]
    parts = [ranks[rank] for rank in replica]
    of_one = {field.name: getattr(parts[0], field.name) for field in fields(KVCacheConfig)}
    block_bytes, state_bytes = sum(one.block_bytes for one in parts), sum(one.state_bytes for one in parts)
    per_token = block_bytes // parts[0].block_size_tokens
    of_one |= {
        "block_bytes": block_bytes,
        "state_bytes": state_bytes,
        "state_in_kv_tokens": math.ceil(state_bytes / per_token) if per_token else None,
        "live_states": max(one.live_states for one in parts),
        "draft_states": max(one.draft_states for one in parts),
    }
    return WorldKVCacheConfig(
        **of_one,
        replicas=len(ranks) // len(parts),
        world_pool_bytes=sum(one.pool_bytes for one in ranks),
        ranks=tuple(
            RankKVCacheConfig(i, one.block_bytes, one.state_bytes, one.pool_bytes) for i, one in enumerate(ranks)
        ),
    )
