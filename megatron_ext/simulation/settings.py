"""Settings of a simulation: model, machine, memory as blocks and snapshot slots, and the limits of the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_ext.config import ModelConfig
from megatron_ext.config.costs import EntryCosts, entry_costs
from megatron_ext.errors import ConfigError
from megatron_ext.memory.arena import MIN_SLABS, ArenaBudget, aligned, plan_slabs
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits, check_aligned
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules

_NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
ELEMENT_BYTES, STATE_ELEMENT_BYTES = 2, 4  # of keys, values and convolution states; of recurrent states


@dataclass(frozen=True)
class CachedModel:
    """Model in a simulation.

    Attributes:
        known: Costs at one block size.
        longest: Maximum number of tokens of a sequence.
    """

    known: EntryCosts
    longest: int

    def reaching(self, tokens: int) -> CachedModel:
        """Return the same model with another maximum number of tokens of a sequence."""
        return replace(self, longest=tokens)

    def costs(self, block_size: int) -> EntryCosts:
        """Return the costs with blocks of this many tokens."""
        bytes_of_block = self.known.block_bytes * block_size // self.known.block_size
        return replace(self.known, block_size=block_size, block_bytes=bytes_of_block)


def _described(config: ModelConfig) -> CachedModel:
    """Return an architecture, whose recurrent layers are Mamba-2, with values of 16 bits and states of 32."""
    pattern = config.hybrid_override_pattern
    kv_bytes = 2 * pattern.count("*") * config.query_groups * config.head_channels * ELEMENT_BYTES
    convolved = config.mamba_heads * config.mamba_head_dim + 2 * config.mamba_num_groups * config.mamba_state_dim
    window = convolved * (config.mamba_conv_kernel - 1) * ELEMENT_BYTES
    state_bytes = config.recurrent.state_size(config) * STATE_ELEMENT_BYTES + window
    costs = entry_costs(config, 1, kv_bytes, pattern.count("M") * state_bytes)
    return CachedModel(costs, config.max_position_embeddings)


def _nemotron() -> ModelConfig:
    """Return Nemotron-H with 8 billion parameters."""
    return ModelConfig(
        hybrid_override_pattern=_NEMOTRON,
        hidden_size=4096,
        ffn_hidden_size=21504,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        mamba_state_dim=128,
        mamba_head_dim=64,
        mamba_num_heads=128,
        mamba_num_groups=8,
        squared_relu=True,
        max_position_embeddings=131072,
    )


def _llama() -> ModelConfig:
    """Return Llama 3 with 8 billion parameters."""
    return ModelConfig(
        hybrid_override_pattern="*-" * 32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        swiglu=True,
        max_position_embeddings=131072,
    )


MODELS = {"nemotron-h-8b": _described(_nemotron()), "llama-3-8b": _described(_llama())}


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
    overtake_tokens: int | None = None  # budget under the schedule policy `lpm`; None: `fcfs`


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
        overtake_tokens=batch.overtake_tokens,
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
