"""Settings of a simulation: costs of models, a machine, and memory and limits of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_ext.config.costs import EntryCosts
from megatron_ext.errors import ConfigError
from megatron_ext.memory.arena import MIN_SLABS, ArenaBudget, aligned, plan_slabs
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits, check_aligned
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from megatron_ext.simulation.trace import MAX_IDS

# By `entry_costs`, with keys, values and convolution states of 16 bits, and recurrent states of 32.
MODELS: Mapping[str, EntryCosts] = {
    "nemotron-h-8b": EntryCosts(
        block_size=64,
        token_flops=14_203_879_424.0,
        position_flops=65_536.0,
        block_bytes=64 * 16_384,
        state_bytes=102_137_856,
    ),
    "llama-3-8b": EntryCosts(
        block_size=64,
        token_flops=13_958_643_712.0,
        position_flops=524_288.0,
        block_bytes=64 * 131_072,
        state_bytes=0,
    ),
}


@dataclass(frozen=True)
class Machine:
    """Cost model of a step: simulated seconds from operations and bytes, at measured or assumed rates of a machine.

    Attributes:
        flops: Operations per second of a prefill.
        bytes: Bytes per second of memory reads in decode: parameters once a step, KV of each request.
        parameter_bytes: Parameter bytes read in every step.
        overhead: Constant seconds of a step.
    """

    flops: float = 4e14
    bytes: float = 3e12
    parameter_bytes: float = 1.6e10
    overhead: float = 2e-3

    def seconds(self, chunks: Iterable[Chunk], costs: EntryCosts) -> float:
        """Return the seconds of a step: the maximum of computing and reading, plus the overhead."""
        operations, read = 0.0, self.parameter_bytes
        for chunk in chunks:
            operations += costs.flops(chunk.start, chunk.end)
            if chunk.is_decode:
                read += chunk.end / costs.block_size * costs.block_bytes + costs.state_bytes
        return self.overhead + max(operations / self.flops, read / self.bytes)


GIB = 1024**3
ROOMY = 1000  # slabs for which a memory surely has room
DEFAULT_STATE_SHARE = 0.2  # of a split: a quarter of the buffer, on top of it


@dataclass(frozen=True)
class Settings:
    """Settings of a simulated engine.

    Attributes:
        memory_gib: Memory of blocks and snapshot slots together; running states are separate.
        state_share: Share of it for snapshots; None if blocks and snapshots share it all, as by default in an engine.
            Without effect if there are no recurrent layers.
        policy: Name of the eviction policy.
        mode: See `SnapshotMode`.
        provisional_slots: Maximum number of opportunistic snapshots; None for as many as slots are free.
        overtake_tokens: Budget under the schedule policy `lpm`; None for `fcfs`.
    """

    memory_gib: float
    state_share: float | None = None
    policy: str = "lru"
    mode: str = "kernel"
    provisional_slots: int | None = None
    max_requests: int = 64
    max_tokens: int = 8192
    max_prefills: int = 0
    max_sequence_length: int = MAX_IDS
    overtake_tokens: int | None = None


def limits_of(costs: EntryCosts, settings: Settings) -> tuple[SchedulerLimits, int | None]:
    """Return the scheduler limits and snapshot slots (None without recurrent layers) for a memory size.

    Raises:
        ConfigError: The memory is smaller than a block, or a step is too small for `align`.
    """
    is_shared = settings.state_share is None and costs.state_bytes > 0
    slabs = _slabs(costs, int(settings.memory_gib * GIB)) if is_shared else None
    blocks, slots = _split(costs, settings) if slabs is None else (slabs.blocks, slabs.slabs)
    is_aligned = settings.mode == "align" and bool(slots)
    limits = SchedulerLimits(
        block_size=costs.block_size,
        total_blocks=blocks,
        paused_blocks=None,
        max_requests=settings.max_requests,
        max_tokens=settings.max_tokens,
        max_sequence_length=settings.max_sequence_length,
        chunked_prefill=True,
        aligned_chunks=is_aligned,
        max_prefills=settings.max_prefills,
        overtake_tokens=settings.overtake_tokens,
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
