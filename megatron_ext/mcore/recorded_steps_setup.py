"""Setup of recorded decode steps, for engines whose forward can be recorded."""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ext.config import BatchingConfig
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.ops import backend_selection, cpp
from megatron_ext.ops.linear import onednn
from megatron_ext.runner.recorded_steps import RecordedSteps


def recorded_steps_for(
    context: InferenceContext, controller: InferenceController, batching: BatchingConfig, *, is_alone: bool
) -> RecordedSteps | None:
    """Return the recorded steps of an engine; None if its decode steps are to run the model's Python code.

    They need the operators in C++ and one process. Captured steps replace them, and experts of MoE layers get as many
    tokens as the router sends, which Python reads.

    Args:
        context: Context whose plan was made with the same settings.
        controller: Controller around the model.
        batching: Settings.
        is_alone: Whether there are no other ranks.
    """
    model, rules = controller.inference_wrapped_model.model, context.staging_rules
    if batching.has_input_buffers or not is_alone or rules.token_rounder != 1 or rules.device.type != "cpu":
        return None
    if batching.operator_backend not in (backend_selection.AUTO, onednn.NAME) or not cpp.are_used():
        return None
    if any(isinstance(module, MoELayer) for module in model.modules()):
        return None
    return RecordedSteps(model, rules)
