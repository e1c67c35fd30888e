"""Draft model beside the engine: its own context and pools, and steps that no scheduler plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_ext.config import BatchingConfig, ModelConfig
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.layers.layer_map import layer_places, model_shape
from megatron_ext.mcore.step_executor import StepExecutor
from megatron_ext.mcore.warm_up import WarmUpPart
from megatron_ext.memory.draft_memory import DraftMemory
from megatron_ext.memory.engine_plan import EnginePlan, plan_draft_model
from megatron_ext.scheduling.step import ScheduledStep
from megatron_ext.speculation.draft_model import DraftModelDrafter, DraftRoom


@dataclass(frozen=True)
class DraftParts:
    """Loaded draft model in eval mode, with its configuration, tokenizer and parameter dtype."""

    model: HybridModel
    config: ModelConfig
    tokenizer: object
    dtype: torch.dtype

    def memory(self, batching: BatchingConfig) -> DraftMemory:
        """Return the memory that the draft model needs from the budget."""
        shape = model_shape(self.model, batching, self.dtype)
        return DraftMemory(shape.kv_bytes_per_token, shape.states.bytes if shape.states else 0)

    def plan(self, plan: EnginePlan, batching: BatchingConfig) -> EnginePlan:
        """Return the plan of the draft model's pools, for which the target model's plan has left room."""
        device = next(self.model.parameters()).device
        return plan_draft_model(plan, model_shape(self.model, batching, self.dtype), self.config, device.type)

    def context(self, plan: EnginePlan) -> InferenceContext:
        """Return a context with these pools, allocated."""
        device = next(self.model.parameters()).device
        context = InferenceContext(plan, layer_places(self.model), device)
        context.allocate_all_tensors(is_init=True)
        return context


class DraftModel(DraftModelDrafter):
    """Drafter that runs a draft model, whose pools are allocated and freed with the engine's.

    Args:
        context: Context of the draft model, with its pools.
        controller: Controller around the draft model.
        longest: Maximum number of positions that the draft model supports.
    """

    def __init__(self, context: InferenceContext, controller: InferenceController, longest: int) -> None:
        self._context = context
        self._steps = StepExecutor(context, controller)
        self._operators = controller.operators
        limits = context.plan.limits
        room = DraftRoom(
            block_size=limits.block_size,
            blocks=limits.total_blocks,
            requests=limits.max_requests,
            step_tokens=limits.max_tokens,
            longest=longest,
            has_states=context.plan.shape.states is not None,
        )
        super().__init__(room, self._tokens)

    def _tokens(self, step: ScheduledStep) -> Mapping[int, int]:
        return self._steps.execute(step).tokens

    def notice_new_weights(self) -> None:
        """Keep everything, since the weights of the draft model are its own."""

    def warm_up_part(self, _: WarmUpPart) -> WarmUpPart:
        """Return this model's part of a warm-up, which does without the target's."""
        return WarmUpPart(self._context, self._steps.compute_eagerly, self._operators)

    def suspend(self) -> None:
        """Free the pools and discard the request states."""
        self.reset()
        self._context.deallocate_all_tensors()

    def resume(self) -> None:
        """Allocate the pools again."""
        self._context.allocate_all_tensors(is_init=False)
