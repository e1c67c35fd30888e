"""Pool sizes of several ranks for reports: in total, and for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_ext.memory.budget import KVCacheConfig


@dataclass(frozen=True)
class RankKVCacheConfig:
    """Share of a replica's blocks and states on one rank, and the bytes of the rank's pools."""

    rank: int
    block_bytes: int
    state_bytes: int
    pool_bytes: int


@dataclass(frozen=True)
class WorldKVCacheConfig(KVCacheConfig):
    """Pool sizes of a replica over all its ranks, with the bytes on each rank.

    Numbers of blocks, slots and running states count one replica; each of its ranks with such layers has as many.
    """

    replicas: int
    world_pool_bytes: int  # of all ranks
    ranks: tuple[RankKVCacheConfig, ...]


def world_kv_cache_config(ranks: Sequence[KVCacheConfig], replica: Sequence[int]) -> KVCacheConfig:
    """Return the total sizes of all ranks; the config itself for a world of one.

    Args:
        ranks: Configs by rank, after they have agreed (see `memory.capacity`).
        replica: Ranks of one replica. The other replicas have equal sizes and layers.
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
        "slab_bytes": sum(one.slab_bytes for one in parts),
        "log_prob_bytes": sum(one.log_prob_bytes for one in parts),
    }
    return WorldKVCacheConfig(
        **of_one,
        replicas=len(ranks) // len(parts),
        world_pool_bytes=sum(one.pool_bytes for one in ranks),
        ranks=tuple(
            RankKVCacheConfig(i, one.block_bytes, one.state_bytes, one.pool_bytes) for i, one in enumerate(ranks)
        ),
    )
