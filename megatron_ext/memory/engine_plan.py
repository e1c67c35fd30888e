"""Engine plan: pool sizes and scheduler limits, from a model's shape and the settings."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from megatron_ext.config import BatchingConfig, CacheConfig, EvictionPolicyName, ModelConfig
from megatron_ext.config.costs import EntryCosts, entry_costs
from megatron_ext.config.model_fields import LEARNED_POSITIONS
from megatron_ext.errors import ConfigError
from megatron_ext.memory.activations import FullStep, LayerWidths, activation_bytes
from megatron_ext.memory.budget import (
    GIB,
    NO_DRAFT_LAYERS,
    DraftMemory,
    KVCacheConfig,
    ModelMemory,
    arena_budget,
    async_states,
    kernel_chunk,
    shares_memory,
)
from megatron_ext.memory.capacity import NO_PEERS, Capacity, Peers, agree, world_kv_cache_config
from megatron_ext.memory.fitting import advice_that_fits, plan_within
from megatron_ext.memory.state_pool import StateShape
from megatron_ext.scheduling.plan import SchedulerLimits, check_aligned, describe_tight_budget
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from megatron_ext.scheduling.snapshots.snapshot_positions import max_snapshots

logger = logging.getLogger(__name__)
LOG_PROB_BYTES = 4  # of a token's log-prob, fp32


@dataclass(frozen=True)
class ModelShape:
    """Shape of a model's KV and states on this rank.

    Attributes:
        attention_layers: Number of layers with a KV cache.
        kv_heads: Key/value heads of each.
        head_channels: Channels of a head.
        dtype: Type of keys and values.
        states: States of one sequence in all recurrent layers; None without recurrent layers.
        output_channels: Width of the output layer's input; 0 on a stage without that layer.
    """

    attention_layers: int
    kv_heads: int
    head_channels: int
    dtype: torch.dtype
    states: StateShape | None
    output_channels: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * self.attention_layers * self.kv_heads * self.head_channels * self.dtype.itemsize

    def log_prob_bytes(self, block_size: int) -> int:
        """Return the bytes of a block's log-probs and of the hidden state at its end; see `LogProbPool`."""
        channels = self.output_channels
        return block_size * LOG_PROB_BYTES + channels * self.dtype.itemsize if channels else 0


@dataclass(frozen=True)
class EnginePlan:
    """Plan of an engine's pools, complete before the first allocation.

    Attributes:
        shape: Shape of the model, on this rank.
        geometry: Effective sizes, on this rank.
        world: Effective sizes of all ranks together.
        limits: Scheduler limits; as the next three, equal on all ranks.
        policy: Eviction policy of the prefix cache; None if it is off.
        is_hybrid: Whether the model has recurrent layers, on any rank.
        positions: Positions that the model has; None if no layer depends on them.
        fingerprint: All that KV and states of equal tokens depend on, except the weights' version.
        activation_bytes: Bytes counted for the temporary tensors of a full step, on this rank.
        advice: Function from available bytes to settings that would fit.
    """

    shape: ModelShape
    geometry: KVCacheConfig
    world: KVCacheConfig
    limits: SchedulerLimits
    policy: EvictionPolicyName | None
    is_hybrid: bool
    positions: int | None
    fingerprint: bytes
    activation_bytes: int
    advice: Callable[[int], str] = field(compare=False, repr=False)

    @property
    def snapshot_slots(self) -> int | None:
        """Snapshot slots, 0 or more; None for a model without recurrent layers."""
        return self.geometry.snapshot_slots if self.is_hybrid else None

    @property
    def first_apart_slot(self) -> int:
        """First slot, in the pool of snapshots, that is not one of theirs; see `SlabLayout.first_apart_slot`."""
        return self.geometry.snapshot_slots if self.geometry.slabs is None else self.geometry.slabs.first_apart_slot

    @property
    def padding_slot(self) -> int:
        """Snapshot slot for padding: the one after those for states after drafts."""
        return self.first_apart_slot + self.geometry.draft_states

    @property
    def spare_slots(self) -> int:
        """Padding slots in each of the pools of running states and snapshots, after the slots of requests.

        See `KVCacheConfig.live_states`.
        """
        return int(self.geometry.live_states > self.limits.max_requests)

    @property
    def request_state_bytes(self) -> int:
        """Maximum bytes of states, on all ranks, of the longest prompt, with its snapshots (LA-4)."""
        geometry, limits = self.world, self.limits
        running = 1 + limits.max_drafts  # each draft has a state of its own until verified
        if geometry.snapshot_slots == 0:
            return running * geometry.state_bytes if geometry.live_states else 0
        left = max_snapshots(limits.max_model_len, limits.block_size, is_aligned=limits.aligned_chunks)
        restored = 1
        return (restored + running + min(left, geometry.snapshot_slots)) * geometry.state_bytes


def plan_engine(
    shape: ModelShape,
    config: ModelConfig,
    batching: BatchingConfig,
    cache: CacheConfig,
    *,
    device_type: str,
    available_bytes: int,
    peers: Peers = NO_PEERS,
    speculative_tokens: int = 0,
    draft: DraftMemory = NO_DRAFT_LAYERS,
    linear: str = "",
) -> EnginePlan:
    """Plan an engine's pools and limits; rank 0 warns once of settings without effect.

    Args:
        shape: Shape of the model, on this rank.
        config: Architecture of the model.
        batching: Limits and budget.
        cache: Settings of the prefix cache: policy, and budget for snapshots.
        device_type: "cpu" or "cuda", for the defaults.
        available_bytes: Bytes of memory for the pools.
        peers: The other ranks, which have to agree on the plan.
        speculative_tokens: Drafts per request that a step may verify; 0 for no speculation.
        draft: Memory of layers that draft, on this rank.
        linear: What the results of packed weights depend on, equal on all ranks; empty without them.

    Raises:
        ConfigError: The budget is too small or exceeds the memory, or settings contradict the model or each other.
    """
    longest = _max_sequence_length(batching, config)
    memory = ModelMemory(
        kv_bytes_per_token=shape.kv_bytes_per_token,
        state_bytes=shape.states.bytes if shape.states else 0,
        chunk_size=config.scan_chunk_size,
        max_sequence_length=longest,
        speculative_tokens=speculative_tokens,
        draft=draft,
        record_bytes=shape.states.record_bytes if shape.states else 0,
        activation_bytes=_activation_bytes(shape, config, batching, longest, device_type, speculative_tokens),
        log_prob_bytes=shape.log_prob_bytes(batching.block_size) if cache.keeps_log_probs else 0,
    )
    # All ranks schedule the same steps, so they agree on numbers that fit the memory of each of them.
    capacities = peers.gather(partial(_capacity, memory, batching, cache, device_type, available_bytes))
    agreed = agree(capacities, slots_within_blocks=cache.snapshot_slots is None)
    world = world_kv_cache_config([capacity.geometry for capacity in agreed], peers.replica)
    costs = entry_costs(config, world.block_size_tokens, world.cached_block_bytes, world.snapshot_bytes)
    limits = replace(_limits(agreed[peers.rank], batching, cache, longest, device_type, costs), slabs=world.slabs)
    ahead = async_states(world.live_states, limits.max_requests) if batching.has_input_buffers else 0
    limits = replace(limits, max_drafts=speculative_tokens, draft_states=world.draft_states, async_states=ahead)
    world = replace(world, max_model_len=limits.max_model_len)
    if limits.aligned_chunks:
        check_aligned(limits)
    plan = EnginePlan(
        shape=shape,
        geometry=agreed[peers.rank].geometry,
        world=world,
        limits=limits,
        policy=cache.policy,
        is_hybrid=config.is_hybrid,
        positions=config.positions,
        fingerprint=_fingerprint(config, shape.dtype, batching, linear),
        activation_bytes=memory.activation_bytes,
        advice=partial(advice_that_fits, memory, batching, cache, device_type),
    )
    if cache.policy is not None and peers.rank == 0:
        _warn_of_cache_settings(plan, cache)
        if world.slabs is None and any(capacity.arena is not None for capacity in capacities):
            logger.warning(_why_fixed(capacities))
    return plan


def _activation_bytes(
    shape: ModelShape, config: ModelConfig, batching: BatchingConfig, longest: int, device_type: str, drafts: int
) -> int:
    """Return the bytes of the temporary tensors of a full step on this rank."""
    tokens, requests = batching.max_tokens_on(device_type), batching.effective_max_requests
    is_cuda = device_type == "cuda"
    step = FullStep(tokens, min(requests, tokens), longest, is_cuda, drafts, torch.get_num_threads())
    share = min(1.0, shape.kv_heads / config.query_groups) if shape.attention_layers else 1.0
    widths = LayerWidths(shape.dtype.itemsize, share)
    if shape.states is not None:
        wider = 2 if shape.dtype == torch.float16 else 1  # its tiles leave states in fp32
        sizes = {"convolved": shape.states.conv[0], "state_elements": wider * math.prod(shape.states.ssm)}
        widths = replace(widths, **sizes)
    return activation_bytes(config, step, widths)


def _why_fixed(capacities: Sequence[Capacity]) -> str:
    """Return why blocks and snapshots do not share an arena although the settings would allow it."""
    if any(capacity.arena is None for capacity in capacities):
        why = "a pipeline stage has no attention layers or no recurrent ones"
    elif len(capacities) > 1:
        why = "blocks and snapshots have other proportions from stage to stage, or too few fit"
    else:
        why = "too few of them fit"
    return f"KV blocks and snapshots have pools of fixed sizes, since {why}"


def _fingerprint(config: ModelConfig, dtype: torch.dtype, batching: BatchingConfig, linear: str) -> bytes:
    """Return a fingerprint of model, state types and packed weights; equal on every rank, whichever layers it holds."""
    return repr((config.to_dict(), dtype, batching.conv_states_dtype, batching.ssm_states_dtype, linear)).encode()


def _capacity(
    memory: ModelMemory, batching: BatchingConfig, cache: CacheConfig, device_type: str, available_bytes: int
) -> Capacity:
    """Return the capacity of this rank; see `plan_within` for the errors."""
    geometry = plan_within(memory, batching, cache, device_type, available_bytes)
    block_bytes, paused_gb = geometry.block_bytes, batching.paused_buffer_size_gb
    paused_blocks = None if paused_gb is None or block_bytes == 0 else int(paused_gb * GIB) // block_bytes
    arena = arena_budget(memory, geometry, batching) if shares_memory(batching, cache) else None
    return Capacity(geometry, paused_blocks, arena)


def _max_sequence_length(batching: BatchingConfig, config: ModelConfig) -> int:
    asked, positions = batching.max_sequence_length, config.positions
    if asked is None:
        return config.max_position_embeddings
    if positions is None or asked <= positions:
        return asked
    is_learned = config.position_embedding_type == LEARNED_POSITIONS
    kind, insists = ("learned", "") if is_learned else ("rotary", ", or insist with --allow-long-max-model-len")
    excess = f"--inference-max-seq-length {asked} is more than the model's {positions} {kind} positions"
    if is_learned or not batching.allow_long_max_model_len:
        raise ConfigError(f"{excess}; give at most {positions}{insists}")
    return asked


def _limits(
    capacity: Capacity, batching: BatchingConfig, cache: CacheConfig, longest: int, device_type: str, costs: EntryCosts
) -> SchedulerLimits:
    geometry = capacity.geometry
    return SchedulerLimits(
        block_size=geometry.block_size_tokens,
        total_blocks=geometry.blocks,
        paused_blocks=capacity.paused_blocks,
        max_requests=batching.effective_max_requests,
        max_tokens=batching.max_tokens_on(device_type),
        max_sequence_length=longest,
        chunked_prefill=batching.enable_chunked_prefill,
        aligned_chunks=cache.is_aligned and geometry.snapshot_slots > 0,
        max_prefills=batching.max_prefills_per_step or 0,
        enough_prefill_tokens=batching.enough_prefill_tokens_on(device_type),
        prefill_tokens_beside_decodes=batching.prefill_tokens_beside_on(device_type),
        decode_share=batching.decode_share or 0.0,
        overtake_tokens=batching.overtake_tokens,
        costs=costs,
        explains=cache.explain_prefix_cache,
        audit_interval=cache.audit_interval if cache.enable_prefix_caching else 0,
        is_durable=cache.is_durable,
        keeps_log_probs=cache.keeps_log_probs,
        keeps_routing=batching.moe_enable_routing_replay,
        opportunistic=OpportunisticRules(max_slots=cache.provisional_slots),
    )


def _warn_of_cache_settings(plan: EnginePlan, cache: CacheConfig) -> None:
    """Warn of cache settings that cannot be met, cost more than necessary, or have no effect."""
    tight = describe_tight_budget(plan.limits) if plan.limits.aligned_chunks else None
    if tight is not None:
        logger.warning(tight)
    asked = cache.snapshot_buffer_gb is not None or cache.snapshot_slots is not None or cache.is_aligned
    if plan.is_hybrid and plan.geometry.snapshot_slots == 0:
        logger.warning(
            "there is no slot for snapshots of recurrent states: KV blocks are shared, and no prompt token is "
            "skipped; give --inference-dynamic-batching-prefix-caching-mamba-gb or -mamba-slots more than 0"
        )
    elif asked and not plan.is_hybrid:
        logger.warning("this model has no recurrent layers: settings of snapshots have no effect")
    if plan.limits.keeps_routing and cache.is_durable:
        logger.warning(
            "--moe-enable-routing-replay: entries of --prefix-cache-dir have no routing indices, so that no prompt "
            "token is skipped because of them; leave one of the flags out"
        )


def plan_draft_layers(
    plan: EnginePlan, shape: ModelShape, config: ModelConfig, device_type: str, parts: int = 1
) -> EnginePlan:
    """Plan the pools of drafting layers, within the memory that `plan` reserves: no cache, one kept state per request.

    Args:
        plan: Plan of the target model.
        shape: Shape of one of the layers.
        config: Architecture of the target model.
        device_type: "cpu" or "cuda"; see `plan_engine`.
        parts: Number of equal pools that share the memory.
    """
    drafts = plan.geometry.draft_layers
    assert drafts is not None, "there is room for it in the plan"
    geometry = replace(
        plan.geometry,
        block_bytes=drafts.block_bytes // parts,
        state_bytes=drafts.state_bytes // parts,
        snapshot_slots=plan.limits.max_requests if shape.states else 0,
        live_states=plan.limits.max_requests if shape.states else 0,
        kernel_chunk=kernel_chunk(config.scan_chunk_size, device_type),
        draft_states=0,
        draft_layers=None,
        slabs=None,
        slab_bytes=0,
        apart_slots=0,
        log_prob_bytes=0,
    )
    limits = replace(
        plan.limits,
        aligned_chunks=True,
        max_drafts=0,
        draft_states=0,
        async_states=0,
        slabs=None,
        keeps_log_probs=False,
    )
    return replace(
        plan,
        shape=shape,
        geometry=geometry,
        world=geometry,
        limits=limits,
        policy=None,
        is_hybrid=shape.states is not None,
    )
