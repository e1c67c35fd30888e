"""The inference context: pools on the device, and the staged step that layers read."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols, get_layer_maps_from_layer_type_list
from torch import Tensor

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.block_allocator import PoolBlockAllocator
from megatron_ext.mcore.staging import StagedStep, snapshots_within, stage_step
from megatron_ext.memory.budget import (
    DEFAULT_MAX_TOKENS,
    Geometry,
    ModelMemory,
    check_fits,
    plan_memory,
    request_state_bytes,
)
from megatron_ext.memory.state_pool import SnapshotPool, StatePool, StateShape, copy_states
from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.ops.paged_attention import PagedLayout
from megatron_ext.ops.rotary import Rotation, rotation_at
from megatron_ext.scheduling.planner import Limits
from megatron_ext.scheduling.request import Chunk
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.snapshots import most_snapshots

logger = logging.getLogger(__name__)

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class InferenceContext(DynamicInferenceContext):
    """`DynamicInferenceContext` whose bookkeeping lives on the host, in a `Scheduler`.

    It owns the KV cache [2, layers, blocks + 1, B, KV heads, D] (the last block is the dummy), the live states, their
    snapshots, and the tensors of the step at hand. The base's initializer and its device-side request tables are not
    used: they are what the scheduler replaces, and they refuse models without attention.

    Args:
        model: Unwrapped model whose layers will use this context.
        config: Its architecture.
        batching: Limits and budget.
        cache: Whether prefixes are cached, what is evicted first, and how many snapshots there is room for.
        params_dtype: Type of the KV cache, and of convolution states unless `batching` says otherwise.
        device: Where the pools live.
        token_rounder: The packed token count is padded to a multiple of this.

    Raises:
        ConfigError: The budget is too small, or the block size does not fit the model.
    """

    def __init__(
        self,
        model: MambaModel,
        config: ModelConfig,
        batching: BatchingConfig,
        cache: CacheConfig,
        *,
        params_dtype: torch.dtype,
        device: torch.device,
        token_rounder: int = 1,
    ) -> None:
        BaseInferenceContext.__init__(self, materialize_only_last_token_logits=True)
        self._device = device
        self._token_rounder = token_rounder
        self.params_dtype = params_dtype
        self._map_layers(model, batching)
        self.max_sequence_length = _max_sequence_length(batching, config)
        self.geometry: Geometry = plan_memory(self._model_memory(config), batching, cache, device.type)
        check_fits(self.geometry, platform.available_memory(device))
        self.block_size_tokens = self.geometry.block_size_tokens
        self._keeps_states_at_chunk_ends = cache.is_aligned and self.geometry.snapshot_slots > 0
        self.limits = self._build_limits(batching)
        if self._keeps_states_at_chunk_ends:
            check_aligned(self.limits)
        self.max_requests, self.max_tokens = self.limits.max_requests, self.limits.max_tokens
        self._policy = cache.policy
        self._fingerprint = repr((config.to_dict(), params_dtype, self._state_shape)).encode()
        self._say_what_is_off(cache)
        self._set_upstream_switches()
        self.is_tensor_state_allocated = False
        self.reset()
        self.allocate_all_tensors(is_init=True)

    def _say_what_is_off(self, cache: CacheConfig) -> None:
        """What was asked for, and cannot be or has no effect, is said once."""
        if self._policy is None:
            return
        asked = cache.snapshot_buffer_gb is not None or cache.snapshot_slots is not None or cache.is_aligned
        if self.is_hybrid_model and self.geometry.snapshot_slots == 0:
            logger.warning(
                "there is no slot for snapshots of recurrent states: KV blocks are shared, and no prompt token is "
                "skipped; give --inference-dynamic-batching-prefix-caching-mamba-gb or -mamba-slots more than 0"
            )
        elif asked and not self.is_hybrid_model:
            logger.warning("this model has no recurrent layers: settings for snapshots of their states have no effect")

    def _map_layers(self, model: MambaModel, batching: BatchingConfig) -> None:
        """Which local layer is the how-manieth of its kind; shapes of the KV cache and the live states."""
        layer_types = model.decoder.layer_type_list
        attention_map, mamba_map, _, _ = get_layer_maps_from_layer_type_list(layer_types)
        self.layer_map = attention_map | mamba_map
        self.num_attention_layers, self.num_mamba_layers = len(attention_map), len(mamba_map)
        self.is_hybrid_model = Symbols.MAMBA in layer_types
        self.num_attention_heads_per_partition = model.config.num_query_groups
        self.hidden_size_per_attention_head = model.config.kv_channels
        self._state_shape: StateShape | None = None
        if self.is_hybrid_model:
            conv, ssm = model.decoder.mamba_state_shapes_per_request()
            conv_dtype = batching.conv_states_dtype
            self._state_shape = StateShape(
                layers=self.num_mamba_layers,
                conv=conv,
                ssm=ssm,
                conv_dtype=STATE_DTYPES[conv_dtype] if conv_dtype else self.params_dtype,
                ssm_dtype=STATE_DTYPES[batching.ssm_states_dtype],
            )

    def _model_memory(self, config: ModelConfig) -> ModelMemory:
        per_token = 2 * self.num_attention_layers * self.num_attention_heads_per_partition
        return ModelMemory(
            kv_bytes_per_token=per_token * self.hidden_size_per_attention_head * self.params_dtype.itemsize,
            state_bytes=self._state_shape.bytes if self._state_shape else 0,
            chunk_size=config.scan_chunk_size,
            max_sequence_length=self.max_sequence_length,
            scans_blocks=config.recurrent_layer == "mamba1",
        )

    def _build_limits(self, batching: BatchingConfig) -> Limits:
        block_bytes = self.geometry.block_bytes
        paused_gb = batching.paused_buffer_size_gb
        has_paused_limit = paused_gb is not None and block_bytes > 0
        return Limits(
            block_size=self.geometry.block_size_tokens,
            total_blocks=self.geometry.blocks,
            paused_blocks=int(paused_gb * 1024**3) // block_bytes if has_paused_limit else None,
            max_requests=batching.max_requests,
            max_tokens=batching.max_tokens or max(DEFAULT_MAX_TOKENS[self._device.type], batching.max_requests),
            max_sequence_length=self.max_sequence_length,
            chunked_prefill=batching.enable_chunked_prefill,
            aligned_chunks=self._keeps_states_at_chunk_ends,
        )

    def request_state_bytes(self, length: int) -> int:
        """Bytes of recurrent states that a prompt of `length` tokens takes at most, its snapshots included."""
        if self.geometry.snapshot_slots == 0:
            return self.geometry.live_states and self.geometry.state_bytes
        limits = self.limits
        snapshots = most_snapshots(length, limits.block_size, limits.max_tokens, is_aligned=limits.aligned_chunks)
        return request_state_bytes(self.geometry.state_bytes, min(snapshots, self.geometry.snapshot_slots))

    def _set_upstream_switches(self) -> None:
        """What upstream's engine, controller and layers ask a dynamic context; features that are not used here."""
        self.cache_mla_latent = False
        self.unified_memory_level = 0
        self.persist_cuda_graphs = False
        self.metrics_writer = None
        self.use_flashinfer_fused_rope = False
        self.cuda_graph_batch_dimensions_list: list = []
        self.request_metadata_types: list = []

    # Pools

    def allocate_all_tensors(self, *, is_init: bool) -> None:
        """Allocate the pools, uninitialised; nothing happens if they are there."""
        if self.is_tensor_state_allocated:
            return
        blocks = self.geometry.blocks + 1 if self.num_attention_layers else 0
        heads, channels = self.num_attention_heads_per_partition, self.hidden_size_per_attention_head
        self.memory_buffer = torch.empty(
            (2, self.num_attention_layers, blocks, self.block_size_tokens, heads, channels),
            dtype=self.params_dtype,
            device=self._device,
        )
        self.live_states = self.snapshots = None
        if self._state_shape is not None:
            self.live_states = StatePool(self._state_shape, self.max_requests, self._device)
            self.snapshots = SnapshotPool(self._state_shape, self.geometry.snapshot_slots, self._device)
        self.is_tensor_state_allocated = True

    def deallocate_all_tensors(self) -> None:
        """Free the pools' memory. Their contents are lost: the scheduler must have been suspended."""
        self.memory_buffer = None
        self.live_states = self.snapshots = None
        self.step: StagedStep | None = None
        self.is_tensor_state_allocated = False

    def reset(self) -> None:
        """Forget every request."""
        slots = self.geometry.snapshot_slots if self.is_hybrid_model else None
        self.scheduler = Scheduler(self.limits, self._policy, self._fingerprint, slots)
        self.block_allocator = PoolBlockAllocator(self.scheduler)
        self.step = None

    # The step at hand

    def stage(self, chunks: Sequence[Chunk]) -> None:
        """Make `chunks` the step that the next forward computes, and put restored states into their rows.

        Raises:
            RestoreError: A snapshot is not the one that its request was to resume from.
        """
        self._rotation: Rotation | None = None
        self.scored_states: Tensor | None = None  # [k, h], of the staged step's `score_tokens`, once it has run
        self._restore_states(chunks)
        self.step = stage_step(
            chunks,
            block_size=self.block_size_tokens,
            dummy_block=self.geometry.blocks,
            kernel_chunk=self.geometry.kernel_chunk,
            is_hybrid=self.is_hybrid_model,
            token_rounder=self._token_rounder,
            device=self._device,
            snapshots_in_prefill=not self._keeps_states_at_chunk_ends,
        )

    def _restore_states(self, chunks: Sequence[Chunk]) -> None:
        """Before any slot is written: one that a request resumes from may be given to another snapshot of this step."""
        restored = [chunk.request for chunk in chunks if chunk.request.restore is not None]
        if restored:
            self.snapshots.restore(
                [request.restore.slot for request in restored],
                [request.restore.digest for request in restored],
                self.live_states,
                [request.state_row for request in restored],
            )
        if self.snapshots is not None:
            self.snapshots.open([one.slot for chunk in chunks for one in snapshots_within(chunk)])

    def finish_snapshots(self, chunks: Sequence[Chunk]) -> None:
        """The forward has succeeded. States inside chunks are in their slots; those at their ends are live now."""
        if self.snapshots is None:
            return
        taken = [(chunk, one) for chunk in chunks for one in snapshots_within(chunk)]
        live = [
            (chunk.request.state_row, one.slot)
            for chunk, one in taken
            if chunk.is_decode or self._keeps_states_at_chunk_ends
        ]
        if live:
            rows, slots = zip(*live, strict=True)
            copy_states(self.live_states, rows, self.snapshots, slots)
        self.snapshots.close([one.slot for _, one in taken], [one.digest for _, one in taken])

    def clear_step(self) -> None:
        """The step is over."""
        self.step = self._rotation = self.scored_states = None

    def current_input_and_position_ids(self, *, num_warmup_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Token ids and absolute positions of the staged step, [1, T] each."""
        return self.step.input_ids[None], self.step.position_ids[None]

    def last_token_logits(self, logits: Tensor) -> Tensor:
        """Select the tokens that are sampled from: [1, T, h] -> [m, h] (see `StagedStep.sample_tokens`).

        The model calls this on hidden states before its output layer, so the forward computes no other logits. The
        hidden states of scored tokens are set aside.
        """
        hidden_states = logits[0]
        self.scored_states = hidden_states[self.step.score_tokens] if self.step.prompt_scores else None
        return hidden_states[self.step.sample_tokens]

    def rotation(self, angles: Tensor) -> Rotation:
        """What the step's tokens are rotated by; the first layer that asks computes it for all of them.

        Args:
            angles: Of all positions, [n, 1, 1, D]; the same for every layer.
        """
        if self._rotation is None:
            self._rotation = rotation_at(angles, self.step.position_ids, self.params_dtype)
        return self._rotation

    @property
    def paged_layout(self) -> PagedLayout:
        """Where the keys of each row lie."""
        return self.step.paged_layout

    @property
    def recurrent_step(self) -> RecurrentStep:
        """What recurrent layers need to know."""
        return self.step.recurrent

    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor) -> None:
        """Write the step's keys and values, [T, 1, KV heads, D] each, to their places; padding is dropped."""
        count = self.step.num_tokens
        for cache, states in zip(self._caches(layer_number), (key, value), strict=True):
            cache.flatten(0, 1).index_copy_(0, self.step.kv_places, states[:count, 0])

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, None]:
        """Key and value cache of a layer, [blocks + 1, B, KV heads, D]; the block table is in `paged_layout`."""
        key_cache, value_cache = self._caches(layer_number)
        return key_cache, value_cache, None

    def _caches(self, layer_number: int) -> Tensor:
        return self.memory_buffer[:, self.layer_map[layer_number - 1]]

    def mamba_states_cache(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Live convolution and SSM states of a layer; written in place."""
        return self.live_states.layer(self.layer_map[layer_number - 1])

    def mamba_snapshots(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Convolution and SSM snapshots of a layer; written in place."""
        return self.snapshots.layer(self.layer_map[layer_number - 1])

    # Upstream's questions, answered from the host

    def is_decode_only(self) -> bool:
        """Whether the staged step only decodes."""
        return self.step is not None and self.step.num_decode == len(self.step.chunks)

    def using_cuda_graph_this_step(self) -> bool:
        """Never, so far."""
        return False

    def has_unfinished_requests(self) -> bool:
        """Whether any request is in the batch."""
        return self.total_request_count > 0

    @property
    def total_request_count(self) -> int:
        """Requests in the batch, paused ones included."""
        return len(self.scheduler.queues.running) + len(self.scheduler.queues.paused)

    @property
    def paused_request_count(self) -> int:
        """Paused requests."""
        return len(self.scheduler.queues.paused)

    @property
    def active_token_count(self) -> int:
        """Tokens of the staged step, without padding."""
        return self.step.num_tokens if self.step else 0

    @property
    def padded_active_token_count(self) -> int:
        """Tokens of the staged step, with padding."""
        return self.step.input_ids.numel() if self.step else 0

    @property
    def padding_slice(self) -> slice:
        """The padding on the token axis."""
        return slice(self.active_token_count, self.padded_active_token_count)

    def get_active_request_count(self) -> int:
        """Requests that have something to do: upstream's loop steps while there are any."""
        return self.total_request_count

    def add_request(self, *_: object, **__: object) -> None:
        """Not here: requests enter through `InferenceEngine.add_request`, and the scheduler admits them."""
        raise NotImplementedError("add requests to the engine; its scheduler admits them to the context")

    def update_requests(self, *_: object, **__: object) -> None:
        """Not here: `Scheduler.commit` and `Scheduler.end` do the bookkeeping, on the host."""
        raise NotImplementedError("the engine's scheduler updates requests")


def _max_sequence_length(batching: BatchingConfig, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    asked = batching.max_sequence_length or longest
    if asked > longest:
        raise ConfigError(
            f"--inference-max-seq-length {asked} is more than the model's {longest}; give at most that, or another "
            "--max-position-embeddings"
        )
    return asked


def check_aligned(limits: Limits) -> None:
    """See that prefill chunks can end on the block grid (LA-3).

    Raises:
        ConfigError: They cannot.
    """
    mode = "--inference-dynamic-batching-prefix-caching-mamba-mode align"
    if not limits.chunked_prefill:
        raise ConfigError(
            f"{mode} cuts prompts into chunks, and --no-enable-chunked-prefill forbids it; drop one of them"
        )
    if limits.max_tokens < limits.block_size:
        raise ConfigError(
            f"{mode} computes a block of {limits.block_size} tokens in a step, and "
            f"--inference-dynamic-batching-max-tokens is {limits.max_tokens}; {limits.block_size} would do"
        )
