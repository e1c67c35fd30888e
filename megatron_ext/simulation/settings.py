"""Settings of a simulated cache: its memory as blocks and snapshot slots, and the limits of its scheduler."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_ext.config.costs import EntryCosts
from megatron_ext.errors import ConfigError
from megatron_ext.memory.arena import MIN_SLABS, ArenaBudget, aligned, plan_slabs
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.snapshots.aligned import check_aligned
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from megatron_ext.simulation.cached_models import CachedModel

GIB = 1024**3
ROOMY = 1000  # slabs for which a memory surely has room
DEFAULT_STATE_SHARE = 0.2  # of a split: a quarter of the buffer, on top of it


@dataclass(frozen=True)
class Settings:
    """Settings of a simulated cache.

    Attributes:
        memory_gib: Memory of blocks and snapshot slots together; running states are separate.
        state_share: Share of it for snapshots; None if blocks and snapshots share it all, as by default in an engine.
            Without effect if there are no recurrent layers.
        block_size: Tokens of a block.
        policy: Name of the eviction policy.
        mode: See `SnapshotMode`.
        provisional_slots: Maximum number of opportunistic snapshots; None for as many as slots are free.
    """

    memory_gib: float
    state_share: float | None = None
    block_size: int = 64
    policy: str = "lru"
    mode: str = "kernel"
    provisional_slots: int | None = None


@dataclass(frozen=True)
class Batch:
    """Limits of a step."""

    max_requests: int = 64
    max_tokens: int = 8192
    max_prefills: int = 0


def limits_of(model: CachedModel, settings: Settings, batch: Batch) -> tuple[SchedulerLimits, int | None]:
    """Return the scheduler limits and snapshot slots (None without recurrent layers) for a memory size.

    Raises:
        ConfigError: The memory is smaller than a block, or a step is too small for `align`.
    """
    costs, memory = model.costs(settings.block_size), int(settings.memory_gib * GIB)
    is_shared = settings.state_share is None and costs.state_bytes > 0
    slabs = _slabs(costs, memory) if is_shared else None
    blocks, slots = _split(costs, settings) if slabs is None else (slabs.blocks, slabs.slabs)
    is_aligned = settings.mode == "align" and bool(slots)
    limits = SchedulerLimits(
        block_size=settings.block_size,
        total_blocks=blocks,
        paused_blocks=None,
        max_requests=batch.max_requests,
        max_tokens=batch.max_tokens,
        max_sequence_length=model.longest,
        chunked_prefill=True,
        aligned_chunks=is_aligned,
        max_prefills=batch.max_prefills,
        costs=costs,
        opportunistic=OpportunisticRules(settings.provisional_slots),
        slabs=slabs,
    )
    if is_aligned:
        check_aligned(limits)
    return limits, slots


def _split(costs: EntryCosts, settings: Settings) -> tuple[int, int | None]:
    """Return the blocks and snapshot slots of a memory that is split; where slabs are impossible, as by an engine."""
    total, slots, share = settings.memory_gib * GIB, None, 0.0
    if costs.state_bytes:
        share = DEFAULT_STATE_SHARE if settings.state_share is None else settings.state_share
        slots = int(total * share / costs.state_bytes)
    blocks = int((total - (slots or 0) * costs.state_bytes) / costs.block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"{settings.memory_gib:g} GiB, {share:g} of it for snapshots, cannot hold one block of {costs.block_bytes} "
            f"bytes; give at least {costs.block_bytes / GIB / max(1e-9, 1 - share):.2g} GiB"
        )
    return blocks, slots


def _slabs(costs: EntryCosts, memory: int) -> SlabLayout | None:
    """Return the slabs in `memory` bytes, as an engine plans them; None if it splits the memory instead.

    An engine also adds the dummy block and slots for other states; both are left out, as in a split.
    """
    block, record = aligned(costs.block_bytes), aligned(costs.state_bytes)
    layout = plan_slabs([ArenaBudget(ROOMY * (block + record), block, record, 0, 0)])
    if layout is None:
        return None
    slab = ArenaBudget(0, block, record, 0, 0).slab_bytes(layout.blocks_per_slab)
    slabs, rest = divmod(memory, slab)
    spare = rest // (slab // layout.blocks_per_slab)
    return dataclasses.replace(layout, slabs=slabs, spare_blocks=spare) if slabs >= MIN_SLABS else None
