"""Inference controller: run the forward of a staged step, sample its tokens and score them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.engine.result import StepResult
from megatron_ext.mcore.hidden_states import HiddenStates
from megatron_ext.mcore.layers.dense_moe import fixed_shapes
from megatron_ext.mcore.layers.moe import reads_back
from megatron_ext.mcore.packed_weights import PackedWeights
from megatron_ext.mcore.versions import Controller, inference_mode
from megatron_ext.memory.pools import Pools
from megatron_ext.ops import backend_selection, cpp
from megatron_ext.ops.backends import AUTO, preferring
from megatron_ext.ops.linear.few_rows import rows_are_independent
from megatron_ext.ops.paged_attention import PAGED_ATTENTION
from megatron_ext.parallel.rank_drafters import LeadingDrafter
from megatron_ext.runner.model_input import ModelInput
from megatron_ext.runner.step_output import sample_and_score
from megatron_ext.runner.step_routing import recorded_routing, routing_by_request
from megatron_ext.scheduling.step import ScheduledChunk
from megatron_ext.speculation.drafter import Drafter
from megatron_ext.text.grammars import Grammars
from megatron_ext.text.vocabulary import Vocabulary


class InferenceController(Controller):
    """`TextGenerationController` that samples every request with a generator of its own.

    Greedy is temperature 0 or top_k 1; top_k and top_p may be combined.

    Args:
        wrapper: Inference wrapper of the model.
        tokenizer: See `megatron_ext.text.tokenizer.Tokenizer`.
        vocabulary_size: V, the width of the logits.

    Attributes:
        vocabulary_size: V.
        drafter: Proposes draft tokens for engines around the model; None disables drafts.
        operators: Backend name of the operators, or AUTO; see `ops.backend_selection`.
        packed: Packed weights of the model's linear layers; None to compute with its parameters.
        has_processed_log_probs: Whether log-probs of generated tokens are of the distributions that they were drawn
            from; else of the model's logits.
        records_routing: Whether results have the routing indices of their tokens.
        leading_drafter: Drafter of several ranks; None without one.
        hidden_states: Hidden states that a layer of multi-token prediction reads; None without one.
    """

    def __init__(self, wrapper: AbstractModelInferenceWrapper, tokenizer: object, vocabulary_size: int) -> None:
        super().__init__(wrapper, tokenizer)
        self.vocabulary_size = vocabulary_size
        self.vocabulary = Vocabulary(tokenizer, vocabulary_size)
        self.drafter: Drafter | None = None
        self.operators = AUTO
        self.packed: PackedWeights | None = None
        self.has_processed_log_probs = False
        self.records_routing = False
        self.leading_drafter: LeadingDrafter | None = None
        self.hidden_states: HiddenStates | None = None
        self._routing: Sequence[Tensor] = ()  # of the MoE layers in the last forward, if it is recorded
        self.grammars = Grammars(self.tokenizer, vocabulary_size)

    def _init_dynamic_sampling_tensors(self) -> None:
        """Prepare nothing: sampling parameters live on the host, and no memory is pinned."""
        self._get_stop_word_finished_ids_callback = None

    def idle_step(self) -> None:
        """Run a step of a replica without requests, whose experts serve other replicas too."""
        if self.inference_wrapped_model.model.config.expert_model_parallel_size > 1:
            self.dummy_forward()

    @torch.inference_mode()
    def dummy_forward(self) -> None:
        """Compute one dummy token through this stage's MoE layers, so that other replicas' expert exchanges complete.

        Only MoE layers exchange data with other replicas, so the token goes through no other layer and needs no input
        from an earlier stage. Upstream's goes through all layers, and with CUDA graphs it resets the cache. All
        tensor-parallel ranks of an idle stage do this once a step.
        """
        model = unwrap_model(self.inference_wrapped_model.model)
        parameter = next(model.parameters())
        token = torch.zeros(1, 1, model.config.hidden_size, dtype=parameter.dtype, device=parameter.device)
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                layer(token)

    async def async_generate_output_tokens_dynamic_batch(self, skip_bookkeeping: bool = False) -> None:
        """Do nothing: `StepExecutor` computes steps, and leaves none staged."""

    def sample(self, logits: Tensor) -> StepResult:
        """Sample and score the context's computed step from its logits [m, V].

        Tensor-parallel ranks get the same logits each, and score together.
        """
        context, is_alone = self.inference_wrapped_model.inference_context, self.inference_wrapped_model.tp_size == 1
        pool = context.allocated.log_probs
        result = sample_and_score(
            logits,
            context.step,
            self._scored_logits,
            pool=pool,
            is_alone=is_alone,
            is_processed=self.has_processed_log_probs,
        )
        if not self.records_routing:
            return result
        return dataclasses.replace(result, routing=routing_by_request(self._routing, context.step))

    @property
    def waits_in_forward(self) -> bool:
        """True if an eager forward waits for the device."""
        with torch.inference_mode(), preferring(self.operators):
            return reads_back(self.inference_wrapped_model.model)

    def forward(self) -> Tensor | None:
        """Run the model's forward of the staged step: logits [1, m, V]; None on stages before the last one."""
        if self.packed is not None:
            self.packed.refresh()
        context = self.inference_wrapped_model.inference_context
        with recorded_routing() if self.records_routing else contextlib.nullcontext(()) as self._routing:
            if context.recorded_steps is None:
                return self._run_model()
            return context.recorded_steps.forward(self._run_model, context.step)

    def _run_model(self) -> Tensor | None:
        input_ids, position_ids = self.inference_wrapped_model.inference_context.current_input_and_position_ids()
        with inference_mode():
            logits: Tensor | None = self.inference_wrapped_model.run_one_forward_step(
                {"tokens": input_ids, "position_ids": position_ids, "attention_mask": None}
            )
        return logits

    # As `CapturedModel`

    @property
    def pools(self) -> Pools | None:
        """Pools of the context; None while they are freed."""
        return self.inference_wrapped_model.inference_context.pools

    def forward_captured(self, step: ModelInput) -> Tensor:
        """Return the logits of a step [rows, V], computed in fixed shapes."""
        context = self.inference_wrapped_model.inference_context
        context.begin(step)
        try:
            with fixed_shapes():
                logits = self.forward()
        finally:
            context.clear_step()
        assert logits is not None, "the last stage is here"
        return logits[0]

    def writing(self, chunks: Sequence[ScheduledChunk]) -> AbstractContextManager[None]:
        """Return a context in which hidden states of the chunks are written, if layers draft."""
        return contextlib.nullcontext() if self.hidden_states is None else self.hidden_states.writing(chunks)

    def weight_addresses(self) -> tuple[int, ...]:
        """Return the memory addresses of the model's parameters and buffers."""
        model = self.inference_wrapped_model.model
        return tuple(one.data_ptr() for tensors in (model.parameters(), model.buffers()) for one in tensors)

    def chosen_operators(self) -> dict[str, tuple[str, ...]]:
        """Return the chosen operators of each backend; see `ops.backend_selection.chosen`."""
        parameter = next(self.inference_wrapped_model.model.parameters())
        linear = None if self.packed is None else self.packed.backend
        return backend_selection.chosen(self.operators, parameter.detach(), linear)

    @property
    def bytes_held_twice(self) -> int:
        """Bytes of weights that are held as they are and packed."""
        return 0 if self.packed is None else self.packed.bytes_held_twice

    def draft_exactness(self) -> str:
        """Return how results with drafts relate to those without, as a text; empty without drafts."""
        plan = self.inference_wrapped_model.inference_context.plan
        if not plan.limits.max_drafts:
            return ""
        weight = next(self.inference_wrapped_model.model.parameters())
        has_exact_states = plan.shape.states is None or plan.shape.states.ssm_dtype == torch.float32
        is_alike = PAGED_ATTENTION.operator in self.chosen_operators().get(cpp.NAME, ())
        if is_alike and has_exact_states and rows_are_independent(weight):
            return "verified to the bits of single tokens"
        return "verified within rounding: where logits are close, a token may differ from one without drafts"

    def _scored_logits(self, rows: slice) -> Tensor:
        """Return logits of some of the step's scored tokens, equal to the model's forward: [k, h] -> [rows, V]."""
        model = unwrap_model(self.inference_wrapped_model.model)
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else None
        states = self.inference_wrapped_model.inference_context.scored_states[rows]
        logits, _ = model.output_layer(states[:, None], weight=weight, runtime_gather_output=True)
        return logits[:, 0]
