"""One number of blocks and slots for all ranks, out of what each of them has room for.

Ranks hold different layers of one model, and every request has its blocks and slots on all of them under the same
numbers. So there are as many as the rank with the least room has; a rank without attention layers has nothing to say
about blocks, one without recurrent layers nothing about slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_ext.memory.budget import KVCacheConfig


@dataclass(frozen=True)
class Capacity:
    """What one rank has room for.

    Attributes:
        geometry: Its pools.
        paused_blocks: That paused requests may keep; None is no limit.
    """

    geometry: KVCacheConfig
    paused_blocks: int | None


Gather = Callable[[Callable[[], Capacity]], Sequence[Capacity]]
"""Asks every rank, in order. What is a mistake on one of them is one on all: `ConfigError`."""


def alone(capacity: Callable[[], Capacity]) -> Sequence[Capacity]:
    """For a world of one."""
    return [capacity()]


@dataclass(frozen=True)
class Peers:
    """Who has to agree, seen from one rank.

    Attributes:
        rank: Of those that are asked.
        replica: The ranks of the first replica.
        gather: Asks all.
    """

    rank: int = 0
    replica: Sequence[int] = (0,)
    gather: Gather = alone


NO_PEERS = Peers()


def agree(capacities: Sequence[Capacity], *, slots_within_blocks: bool) -> list[Capacity]:
    """What each rank makes of what all have room for.

    Args:
        rooms: Of every rank.
        slots_within_blocks: More snapshot slots than blocks would be of no use.
    """
    geometries = [capacity.geometry for capacity in capacities]
    blocks = min(one.blocks for one in _those_with(geometries, lambda one: one.block_bytes))
    with_states = _those_with(geometries, lambda one: one.state_bytes)
    slots = min(one.snapshot_slots for one in with_states)
    hits = [one.shortest_prompt_that_can_hit for one in with_states]
    paused = [capacity.paused_blocks for capacity in capacities if capacity.paused_blocks is not None]
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
    """The ranks that have a resource; all of them if none has, since then they say the same."""
    return [one for one in geometries if resource(one)] or geometries
