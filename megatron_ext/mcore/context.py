"""Inference context: the pools on the device, their counts as Megatron's allocator has them, and the staged step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megatron_ext.config.batching import SuspendLevel
from megatron_ext.engine.core import EngineCore
from megatron_ext.mcore.layers.layer_map import LayerIndices
from megatron_ext.mcore.versions import BlockAllocator, Context
from megatron_ext.memory.engine_plan import EnginePlan
from megatron_ext.memory.heap import give_back_freed_memory
from megatron_ext.memory.pools import OffloadedPools, Pools, allocate_pools
from megatron_ext.memory.step_states import StepStates
from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.paged_attention import PagedBatch
from megatron_ext.ops.rotary import Heads, Rotation, rotate_and_write, rotation_at
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.runner.input_writer import BlockRows, StagingRules
from megatron_ext.runner.model_input import ModelInput, stage_step
from megatron_ext.runner.recorded_steps import RecordedSteps
from megatron_ext.runner.step_output import scored_states
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import ScheduledStep
from megatron_ext.speculation.drafter import Drafter

Sampled = TypeVar("Sampled")


class PoolBlockAllocator(BlockAllocator):
    """Counts of `BlockAllocator`, answered from the scheduler on the host without a device read-back.

    Only the scheduler allocates blocks, so the methods that allocate or release raise.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.total_count = self.pool_size = scheduler.cache.pool.total + 1  # upstream counts the dummy block
        self.dummy_block_idx = scheduler.cache.pool.total
        self.paused_count = self.paused_limit = scheduler.limits.paused_blocks or 0
        self.active_count = scheduler.cache.pool.total

    @property
    def total_avail(self) -> int:
        """Number of blocks that could be allocated now: free blocks, and cached blocks without references."""
        return self._scheduler.cache.available_count

    def get_active_used(self) -> int:
        """Return the number of blocks in the tables of running requests."""
        return _distinct_blocks(self._scheduler.queues.running)

    def get_paused_used(self) -> int:
        """Return the number of blocks that paused requests keep."""
        return _distinct_blocks(self._scheduler.queues.paused)

    def _refuse(self, *_: object) -> None:
        raise NotImplementedError("the engine's scheduler allocates and releases blocks")

    allocate_memory_blocks = release_memory_blocks = reset = _refuse


def _distinct_blocks(requests: Iterable[Request]) -> int:
    return len({block for request in requests for block in request.block_table})


class InferenceContext(Context):
    """`DynamicInferenceContext` that holds the pools and the staged step, and makes no scheduling decision.

    The base's initializer and its device-side request tables are not used: our scheduler replaces them, and they refuse
    models without attention. The attached scheduler answers upstream's questions about requests.

    Args:
        plan: Sizes of all pools and buffers.
        layer_indices: Index of each layer's keys, values and states in the pools.
        device: Device of the pools.

    Attributes:
        staging_rules: Facts of pools and model that staging uses.
    """

    # Attributes that upstream's engine, controller and layers read; features that are not used here.
    cache_mla_latent = False
    unified_memory_level = 0
    persist_cuda_graphs = False
    metrics_writer = None
    use_flashinfer_fused_rope = False
    cuda_graph_batch_dimensions_list: Sequence[object] = ()
    request_metadata_types: Sequence[object] = ()

    suspend_level: SuspendLevel = "drop"  # of a suspend that names none
    block_allocator: PoolBlockAllocator | None
    kv_block_allocator: PoolBlockAllocator | None
    _core: EngineCore  # set by `attach`

    def __init__(self, plan: EnginePlan, layer_indices: LayerIndices, device: torch.device) -> None:
        self.plan = plan
        self.max_requests, self.max_tokens = plan.limits.max_requests, plan.limits.max_tokens
        self.max_sequence_length = plan.limits.max_model_len
        self.block_size_tokens = plan.geometry.block_size_tokens
        super().__init__(
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
            max_sequence_length=self.max_sequence_length,
            block_size_tokens=self.block_size_tokens,
            enable_chunked_prefill=plan.limits.chunked_prefill,
        )
        self.pools: Pools | None = None
        self._offloaded: OffloadedPools | None = None
        self.drafting: Drafter | None = None  # its pools are allocated and freed with these
        self.step: ModelInput | None = None
        self.scored_states: Tensor | None = None  # hidden states of the step's scored tokens, [k, h]
        self.block_allocator = self.kv_block_allocator = None  # until an engine core is attached
        self.cuda_graph_runner: CudaGraphRunner | None = None  # None runs every step eagerly
        self.recorded_steps: RecordedSteps | None = None  # None runs the model's Python code in every eager step
        self._rotation: Rotation | None = None
        self._block_rows = BlockRows()
        self._layer_indices = layer_indices
        self._device = device
        self.staging_rules = StagingRules(
            block_size=plan.geometry.block_size_tokens,
            dummy_block=plan.geometry.blocks,
            kernel_chunk=plan.geometry.kernel_chunk,
            has_states=plan.shape.states is not None,
            snapshots_in_prefill=not plan.limits.aligned_chunks,
            device=device,
        )

    def attach(self, core: EngineCore) -> None:
        """Attach the engine core, whose scheduler and counters answer upstream's questions."""
        self._core = core
        self.block_allocator = self.kv_block_allocator = PoolBlockAllocator(core.scheduler)  # since 0.17 the latter

    # Pools

    def allocate_all_tensors(self, *, is_init: bool) -> None:
        """Allocate the pools, uninitialised or with their offloaded contents; a no-op if they are allocated.

        Raises:
            ConfigError: There is less memory than seemed to be free; no pool is kept then.
        """
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        if self.pools is None:
            self.pools = allocate_pools(self.plan, self._device)
        if self.drafting is not None:
            self.drafting.resume()

    def deallocate_all_tensors(self, *, offloads: bool = False) -> None:
        """Free the pools' memory. Their contents are lost unless they go to host memory; a drafter's always are.

        Args:
            offloads: Whether they wait in host memory; otherwise the scheduler must have been suspended.
        """
        self._offloaded = OffloadedPools(self.allocated) if offloads else None
        self.pools, self.step = self.pools if offloads else None, None
        for steps in (self.cuda_graph_runner, self.recorded_steps):
            if steps is not None:
                steps.forget()
        if self.drafting is not None:
            self.drafting.suspend()
        give_back_freed_memory()

    @property
    def is_tensor_state_allocated(self) -> bool:
        """True if the pools are allocated."""
        return self.pools is not None and self._offloaded is None

    @property
    def allocated(self) -> Pools:
        """Allocated pools; asserts that the engine is not suspended."""
        assert self.pools is not None, "the engine is suspended: there are no pools"
        return self.pools

    @property
    def memory_buffer(self) -> Tensor:
        """KV cache; see `Pools`."""
        return self.allocated.kv

    @property
    def is_hybrid_model(self) -> bool:
        """True if there are recurrent layers, on this stage or another."""
        return self.plan.is_hybrid

    @property
    def params_dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.plan.shape.dtype

    def reset(self) -> None:
        """Discard the staged step and the state of a drafter."""
        self.clear_step()
        if self.drafting is not None:
            self.drafting.reset()

    # The staged step

    def compute(
        self,
        step: ScheduledStep,
        forward: Callable[[ScheduledStep, StepStates], Callable[[], Sampled]],
        operators: str,
    ) -> Sampled:
        """Compute a step: restore states, run its forward, keep states, sample.

        If anything raises, the step has no effect, and its requests' pool contents are undefined.

        Args:
            step: Scheduled step.
            forward: Restores the states, computes logits, and returns the function that samples them.
            operators: Backend name of the operators, which restores and snapshots are, too; or AUTO.

        Raises:
            RestoreError: A slot does not hold the snapshot that a request needs.
        """
        with torch.inference_mode(), preferring(operators):
            try:
                states = StepStates(self.allocated, step, at_chunk_ends=self.plan.limits.aligned_chunks)
                sample = forward(step, states)
                states.keep()
                return sample()
            finally:
                self.clear_step()

    def stage(self, step: ScheduledStep) -> None:
        """Let the next eager or recorded forward compute `step`."""
        self._rotation = None
        recorded = None if self.recorded_steps is None else self.recorded_steps.stage(step)
        tokens = None if self.cuda_graph_runner is None else self.cuda_graph_runner.prev_sampled_token_ids
        self.step = recorded or stage_step(step, self.staging_rules, self._block_rows, prev_sampled=tokens)

    def prepare_cuda_graphs(self) -> None:
        """Capture the CUDA graphs ahead of time, if there is a runner and the capture is slow."""
        if self.cuda_graph_runner is not None:
            self.cuda_graph_runner.prepare()

    def notice_new_weights(self) -> None:
        """Note that weights have changed and may have moved in memory."""
        if self.cuda_graph_runner is not None:
            self.cuda_graph_runner.notice_new_weights()
        if self.recorded_steps is not None:
            self.recorded_steps.forget()
        if self.drafting is not None:
            self.drafting.notice_new_weights()

    def begin(self, staged: ModelInput) -> None:
        """Let the next forward compute a step that is staged already."""
        self._rotation, self.step = None, staged

    def clear_step(self) -> None:
        """Discard the step after its end."""
        self.step = self._rotation = self.scored_states = None

    @property
    def staged(self) -> ModelInput:
        """Staged step; set from `stage` to `clear_step`."""
        assert self.step is not None, "no step is staged"
        return self.step

    def current_input_and_position_ids(self, *, num_warmup_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """Return token ids and absolute positions of the staged step, [1, T] each."""
        return self.staged.input_ids[None], self.staged.position_ids[None]

    def last_token_logits(self, logits: Tensor) -> Tensor:
        """Select the tokens that are sampled from: [1, T, h] -> [m, h] (see `ModelInput.sample_tokens`).

        The model calls this on hidden states before its output layer, so the forward computes no other logits. The
        hidden states of scored tokens are set aside.
        """
        hidden_states = logits[0]
        self.scored_states = scored_states(hidden_states, self.staged, self.allocated.log_probs)
        return hidden_states[self.staged.sample_tokens]

    def rotation(self, angles: Tensor, magnitude: float = 1.0) -> Rotation:
        """Return the rotation of the step's tokens; computed once, by the first layer that calls this.

        Args:
            angles: Angles of all positions, [n, 1, 1, D]; the same for every layer.
            magnitude: Factor of the rotated values; the same for every layer.
        """
        if self._rotation is None:
            self._rotation = rotation_at(angles, self.staged.position_ids, self.params_dtype, magnitude)
        return self._rotation

    @property
    def paged_batch(self) -> PagedBatch:
        """Block tables and lengths of the step's requests."""
        return self.staged.paged_batch

    @property
    def recurrent_step(self) -> RecurrentStep:
        """Step metadata of recurrent layers."""
        recurrent = self.staged.recurrent
        assert recurrent is not None, "a step of a model with recurrent layers has it"
        return recurrent

    def append_rotated(self, layer_number: int, heads: Heads, rotation: Rotation | None) -> Tensor:
        """Write rotated keys, and values, to their slots (none for padding); return the queries [T, Hq, D]."""
        key_cache, value_cache = self.key_value_cache(layer_number)
        return rotate_and_write(heads, rotation, key_cache, value_cache, self.staged.slot_mapping)

    def key_value_cache(self, layer_number: int) -> Tensor:
        """Return key and value cache of a layer, [2, blocks + 1, B, KV heads, D]."""
        return self.memory_buffer[:, self._layer_indices.kv[layer_number - 1]]

    def mamba_states_cache(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return live convolution and SSM states of a layer; written in place."""
        live = self.allocated.live_states
        assert live is not None, "a recurrent layer has states"
        return live.layer(self._layer_indices.states[layer_number - 1])

    def mamba_snapshots(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return convolution and SSM snapshots of a layer; written in place."""
        snapshots = self.allocated.snapshots
        assert snapshots is not None, "a recurrent layer has states"
        return snapshots.layer(self._layer_indices.states[layer_number - 1])

    # Upstream's queries, answered from the host

    def is_decode_only(self) -> bool:
        """Return whether the staged step only decodes."""
        return self.step is not None and self.step.num_decode == len(self.step.chunks)

    def using_cuda_graph_this_step(self) -> bool:
        """Return False: captured steps are replayed by the step executor, never by upstream's graph code."""
        return False

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is in the batch."""
        return self.total_request_count > 0

    @property
    def _queues(self) -> Queues:
        return self._core.scheduler.queues

    @property
    def total_request_count(self) -> int:
        """Number of requests in the batch, paused ones included."""
        return len(self._queues.running) + len(self._queues.paused)

    @property
    def paused_request_count(self) -> int:
        """Number of paused requests."""
        return len(self._queues.paused)

    @property
    def active_token_count(self) -> int:
        """Number of tokens of the staged step, without padding."""
        return self.step.num_tokens if self.step else 0

    @property
    def padded_active_token_count(self) -> int:
        """Number of tokens of the staged step, with padding."""
        return self.step.input_ids.numel() if self.step else 0

    @property
    def step_count(self) -> int:
        """Number of computed steps (0.19's name of the engine's)."""
        return self._core.step_count

    @property
    def lifetime_prefill_token_count(self) -> int:
        """Prefill tokens computed by all requests, recomputed tokens included (0.19's name of the engine's)."""
        return self._core.counters.prefill_tokens

    @property
    def async_sched_step_count(self) -> int:
        """Number of steps launched before the tokens of the previous step were known."""
        return self._core.step_counts().asynchronous

    @property
    def async_sched_compaction_step_count(self) -> int:
        """Number of steps launched so of which rows were discarded."""
        return self._core.step_counts().discarding

    def get_active_request_count(self) -> int:
        """Return the number of requests with pending work: upstream's loop steps while there are any."""
        return self.total_request_count

    def add_request(self, *_: object, **__: object) -> None:
        """Raise NotImplementedError: `InferenceEngine.add_request` queues requests, and the scheduler admits them."""
        raise NotImplementedError("call add_request(request_id, prompt, sampling_params) of the engine instead")

    def update_requests(self, *_: object, **__: object) -> None:
        """Raise NotImplementedError: `Scheduler.commit` and `Scheduler.end` do the bookkeeping on the host."""
        raise NotImplementedError("the engine's scheduler updates requests")
