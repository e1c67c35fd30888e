"""Agreement of all ranks on the number of blocks and slots, from the capacity of each rank.

Ranks hold different layers of one model, and every request has its blocks and slots on all of them under the same
numbers. So the rank with the smallest capacity decides; ranks without attention layers do not count for blocks, and
ranks without recurrent layers do not count for slots. Blocks and snapshots share an arena if all ranks can. Reports
have the sizes in total, and for each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from megatron_ext.memory.arena import ArenaBudget, plan_slabs
from megatron_ext.memory.budget import KVCacheConfig, share


@dataclass(frozen=True)
class Capacity:
    """Capacity of one rank.

    Attributes:
        geometry: Sizes of the rank's pools.
        paused_blocks: Blocks that paused requests may keep; None for no limit.
        arena: What the rank would put into an arena; None if it cannot share one, or the settings give a fixed split.
    """

    geometry: KVCacheConfig
    paused_blocks: int | None
    arena: ArenaBudget | None = None


Gather = Callable[[Callable[[], Capacity]], Sequence[Capacity]]
"""Collects the capacity of every rank, in order; an error on one rank is a `ConfigError` on all."""


@dataclass(frozen=True)
class Peers:
    """Ranks that have to agree, from the view of one rank.

    Attributes:
        rank: This rank, as an index into the gathered capacities.
        replica: Ranks of the first replica.
        gather: Function that gathers the capacities of all ranks.
    """

    rank: int = 0
    replica: Sequence[int] = (0,)
    gather: Gather = lambda capacity: [capacity()]


NO_PEERS = Peers()


def agree(capacities: Sequence[Capacity], *, slots_within_blocks: bool) -> list[Capacity]:
    """Return the capacity that each rank uses, given the capacities of all.

    Args:
        capacities: Capacity of every rank, in order.
        slots_within_blocks: Whether to limit snapshot slots to the number of blocks.
    """
    geometries = [capacity.geometry for capacity in capacities]
    blocks = min(one.blocks for one in _those_with(geometries, lambda one: one.block_bytes))
    with_states = _those_with(geometries, lambda one: one.state_bytes)
    slots = min(one.snapshot_slots for one in with_states)
    hits = [one.shortest_prompt_that_can_hit for one in with_states]
    paused = [capacity.paused_blocks for capacity in capacities if capacity.paused_blocks is not None]
    budgets = [capacity.arena for capacity in capacities if capacity.arena is not None]
    layout = plan_slabs(budgets) if len(budgets) == len(capacities) else None
    if layout is not None:
        shared = [share(one, budget, layout) for one, budget in zip(geometries, budgets, strict=True)]
        return [Capacity(one, min(paused, default=None)) for one in shared]
    agreed = [
        replace(
            one,
            blocks=blocks,
            snapshot_slots=min(slots, blocks) if slots_within_blocks else slots,
            shortest_prompt_that_can_hit=None if None in hits else hits[0],
        )
        for one in geometries
    ]
    return [Capacity(one, min(paused, default=None)) for one in agreed]


def _those_with(
    geometries: Sequence[KVCacheConfig], resource: Callable[[KVCacheConfig], int]
) -> Sequence[KVCacheConfig]:
    """Return the configs of the ranks that have a resource; all configs if no rank has, since then they agree."""
    return [one for one in geometries if resource(one)] or geometries


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
