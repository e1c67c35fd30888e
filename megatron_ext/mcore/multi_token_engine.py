"""Layer of multi-token prediction as a drafter: its own context and pools beside the engine's (SP-10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_ext.config import BatchingConfig, ModelConfig
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.hidden_states import KEPT_TOKENS, HiddenStates
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.layers.layer_map import layer_indices, stack_shape
from megatron_ext.mcore.layers.multi_token_prediction import PredictionLayer
from megatron_ext.mcore.versions import inference_mode
from megatron_ext.mcore.warm_up import WarmUpPart
from megatron_ext.memory.budget import DraftMemory
from megatron_ext.memory.engine_plan import ModelShape, plan_draft_layers
from megatron_ext.memory.step_states import StepStates
from megatron_ext.runner.recorded_steps import MAX_ROWS
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep
from megatron_ext.speculation.multi_token import ChunkInput, MultiTokenDrafter


@dataclass(frozen=True)
class PredictionDrafterBuilder:
    """Model with layers of multi-token prediction, and the settings to build its drafter.

    Attributes:
        model: Model in eval mode, with the layers on this stage.
        config: Configuration of the model.
        dtype: Type of the parameters.
        drafts: Maximum number of drafts.
    """

    model: HybridModel
    config: ModelConfig
    dtype: torch.dtype
    drafts: int

    @property
    def depths(self) -> int:
        """Layers that draft: one for all drafts, or one for each."""
        assert self.model.mtp is not None, "the caller has looked"
        return min(self.drafts, len(self.model.mtp.layers))

    def layer(self, depth: int) -> PredictionLayer:
        """Return the layer of a depth, counted from 1."""
        assert self.model.mtp is not None, "the caller has looked"
        return self.model.mtp.layer_of(depth)

    def _shape(self, batching: BatchingConfig) -> ModelShape:
        return stack_shape(self.layer(1).mtp_model_layer, self.model.config, batching, self.dtype)

    def memory(self, batching: BatchingConfig) -> DraftMemory:
        """Return the memory that the layers need from the budget, the hidden states that they read included."""
        shape, hidden = self._shape(batching), KEPT_TOKENS * self.config.hidden_size * self.dtype.itemsize
        states = shape.states.bytes if shape.states else 0
        return DraftMemory(shape.kv_bytes_per_token * self.depths, states * self.depths, hidden * self.depths)

    def layers(self, target: InferenceContext, batching: BatchingConfig) -> list[PredictionLayerDrafter]:
        """Return the drafter of each depth beside a context, with pools of its own.

        Raises:
            ConfigError: There is less memory than seemed to be free.
        """
        device = next(self.model.parameters()).device
        plan = plan_draft_layers(target.plan, self._shape(batching), self.config, device.type, self.depths)
        requests, operators = plan.limits.max_requests, batching.operator_backend
        captured = 0 if target.cuda_graph_runner is None else target.cuda_graph_runner.max_tokens
        recorded = 0 if target.recorded_steps is None else min(requests * (1 + self.drafts), MAX_ROWS)
        states = HiddenStates(self.model, target, requests, captured, recorded_tokens=recorded)
        layers, hook = list[PredictionLayerDrafter](), states.hook
        for depth in range(1, self.depths + 1):
            context = InferenceContext(plan, layer_indices(self.layer(1).mtp_model_layer.layer_type_list), device)
            context.allocate_all_tensors(is_init=True)
            if target.recorded_steps is not None:
                context.recorded_steps = target.recorded_steps.beside(context.staging_rules, 1 + self.drafts, hook)
            outputs = None
            if depth < self.depths:
                outputs = HiddenStates(self.model, context, requests, watches=False)
            layers.append(PredictionLayerDrafter(self, context, states, operators, depth, outputs))
            states = outputs or states
        return layers


@dataclass(frozen=True)
class _Buffers:
    """Inputs and outputs of a step's tokens, which a record reads and writes where they lie.

    Attributes:
        hidden: Hidden states, [T, h].
        shifts: Positions in the request less those in the layer's text, [T].
        outputs: Outputs of the layer, [T, h].
    """

    hidden: Tensor
    shifts: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, tokens: int, like: Tensor) -> _Buffers:
        """Return buffers for `tokens` tokens."""
        width = like.shape[1]
        shifts = torch.zeros(tokens, dtype=torch.int64, device=like.device)
        return cls(like.new_empty(tokens, width), shifts, like.new_empty(tokens, width))


class PredictionLayerDrafter(MultiTokenDrafter):
    """Drafter that computes a layer of multi-token prediction, whose pools come and go with the engine's.

    Args:
        parts: The model.
        context: Context of the layer, with its pools.
        states: Hidden states of the target model.
        operators: Backend name of the operators, or AUTO.
        depth: Depth of the layer, counted from 1.
        outputs: Kept outputs, which the layer of the next depth reads; None without one.

    Attributes:
        hidden_states: As given.
    """

    def __init__(
        self,
        parts: PredictionDrafterBuilder,
        context: InferenceContext,
        states: HiddenStates,
        operators: str,
        depth: int = 1,
        outputs: HiddenStates | None = None,
    ) -> None:
        self._layer, self._kept_outputs, self._is_layered = parts.layer(depth), outputs, parts.depths > 1
        self.hidden_states = states
        self._parts, self._context, self._hidden, self._operators = parts, context, states, operators
        self._read_outputs: dict[int, Tensor] = {}  # after the last read token
        self._outputs: dict[int, Tensor] = {}  # after the last token, drafts included
        self._sampled: tuple[int, ...] = ()  # requests of the last step's rows of logits
        like = next(parts.model.parameters()).new_empty(0, parts.config.hidden_size)
        self._buffers = _Buffers.of(MAX_ROWS, like)
        plan = context.plan
        super().__init__(plan.limits, plan.shape.states is not None, self._tokens, states)

    def notice_new_weights(self) -> None:
        """Forget all requests, whose keys, values and hidden states are of the old weights."""
        self._context.notice_new_weights()
        self.reset()

    def warm_up_part(self, target: WarmUpPart) -> WarmUpPart:
        """Return this layer's part of a warm-up; each of its steps follows one of the target, whose states it reads."""

        def run(step: ScheduledStep) -> None:
            chunks = [replace(chunk, snapshots=(), target_sampling=()) for chunk in step.chunks]
            target.run(replace(step, chunks=tuple(chunks)))
            self.logits(step, {chunk.request_id: ChunkInput(position=1, drafts=0) for chunk in chunks})

        return WarmUpPart(self._context, run, self._operators)

    def suspend(self) -> None:
        """Free the pools and discard the states of requests."""
        self._context.deallocate_all_tensors()
        self._hidden.free()
        self.reset()

    def resume(self) -> None:
        """Allocate the pools again."""
        self._context.allocate_all_tensors(is_init=False)
        self._hidden.allocate()

    def forget(self, request_id: int) -> None:
        """Free all memory of a request."""
        super().forget(request_id)
        self._read_outputs.pop(request_id, None)
        self._outputs.pop(request_id, None)

    def reset(self) -> None:
        """Forget all requests."""
        super().reset()
        self._read_outputs.clear()
        self._outputs.clear()

    def logits(self, step: ScheduledStep, inputs: Mapping[int, ChunkInput]) -> Tensor:
        """Compute the layer for a step; return the logits after each chunk that is sampled from, [m, V]."""
        with inference_mode():
            return self._context.compute(step, partial(self._forward, inputs), self._operators)

    def _forward(
        self, inputs: Mapping[int, ChunkInput], step: ScheduledStep, states: StepStates
    ) -> Callable[[], Tensor]:
        """Run the layer's forward; keep its outputs for the next draft, and for the layer of the next depth."""
        context = self._context
        states.restore()
        context.stage(step)
        chunks, recorded = context.staged.chunks, context.recorded_steps
        buffers = self._filled(chunks, inputs)
        run = partial(self._run, buffers)
        logits = run() if recorded is None else recorded.forward(run, context.staged)
        output = buffers.outputs[:, None]
        self._keep_outputs(inputs, output[context.staged.sample_tokens])
        if self._kept_outputs is not None:
            self._kept_outputs.write([_placed(one, inputs[one.request_id]) for one in chunks], output)
        return lambda: logits

    def _filled(self, chunks: Sequence[ScheduledChunk], inputs: Mapping[int, ChunkInput]) -> _Buffers:
        """Return the buffers of the staged step, with its hidden states and shifts of positions."""
        count = self._context.staged.num_tokens
        kept = self._buffers if count <= MAX_ROWS else _Buffers.of(count, self._buffers.hidden)
        buffers = _Buffers(kept.hidden[:count], kept.shifts[:count], kept.outputs[:count])
        torch.cat([self._hidden_states(chunk, inputs[chunk.request_id]) for chunk in chunks], out=buffers.hidden)
        shifts = [inputs[chunk.request_id].position - chunk.start for chunk in chunks]
        buffers.shifts.copy_(torch.from_numpy(np.repeat(shifts, [chunk.length for chunk in chunks])))
        return buffers

    def _run(self, buffers: _Buffers) -> Tensor:
        """Compute the staged step, whose outputs go to the buffers; return the logits, [m, V]."""
        model, context = self._parts.model, self._context
        ids, positions = context.current_input_and_position_ids()
        embedded = model.embedding(ids, positions + buffers.shifts)
        is_rope = model.position_embedding_type == "rope"
        angles = model.rotary_pos_emb(context.max_sequence_length) if is_rope else None
        output = self._layer(buffers.hidden[:, None], embedded, context, angles)
        buffers.outputs.copy_(output[:, 0])
        last = output[context.staged.sample_tokens]
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits: Tensor = model.output_layer(last, weight=weight, runtime_gather_output=True)[0][:, 0]
        return logits

    def _tokens(self, step: ScheduledStep, inputs: Mapping[int, ChunkInput]) -> Mapping[int, int]:
        found = self.logits(step, inputs)
        return dict(zip(self._sampled, found.argmax(dim=-1).tolist(), strict=True))

    def _hidden_states(self, chunk: ScheduledChunk, given: ChunkInput) -> Tensor:
        """Return the hidden states that a chunk continues, [length, h]."""
        if given.drafts == 0 or self._is_layered:
            before = range(given.position - 1, given.position - 1 + chunk.length)
            return self._hidden.read([(chunk.request_id, before)])
        outputs = self._read_outputs if given.drafts == 1 else self._outputs
        return outputs[chunk.request_id]

    def _keep_outputs(self, inputs: Mapping[int, ChunkInput], last: Tensor) -> None:
        self._sampled = tuple(row.request_id for row in self._context.staged.sampling)
        for number, request_id in enumerate(self._sampled):
            self._outputs[request_id] = last[number]
            if inputs[request_id].drafts == 0:
                self._read_outputs[request_id] = last[number]


def _placed(chunk: ScheduledChunk, given: ChunkInput) -> ScheduledChunk:
    """Return a chunk at its position in the request."""
    return replace(chunk, start=given.position, end=given.position + chunk.length)
