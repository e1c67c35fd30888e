"""Parallel layer: attention and a recurrent mixer that read the same input side by side."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from megatron_ext.mcore.layers.layer_config import LayerConfig
from megatron_ext.mcore.layers.residual_layers import Branch, MixerOutput, RecurrentLayer


@dataclass
class ParallelLayerSubmodules(MambaLayerSubmodules):
    """Submodules of a recurrent layer, and attention."""

    self_attention: ModuleSpec | type = IdentityOp


class ParallelLayer(RecurrentLayer):
    """X + factors * (mixer(norm(x)), attention(norm(x))): one norm, one residual; keys, values and states.

    The forward is the same at inference and in training. Dropout, which our configurations do not use, is not applied.
    """

    def __init__(
        self,
        config: LayerConfig,
        submodules: ParallelLayerSubmodules,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        **options: object,
    ) -> None:
        super().__init__(config, submodules, layer_number=layer_number, pg_collection=pg_collection, **options)
        self.attention_factor = config.residual_multiplier * config.attention_output_multiplier
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=pg_collection
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Compute [s, b, h] -> [s, b, h]; see `RecurrentMixer.forward` and `PagedSelfAttention.forward`."""
        normed = self.norm(hidden_states)
        mixed = self.mixer(normed, inference_context)
        attended = self.self_attention(
            normed, attention_mask, inference_context=inference_context, rotary_pos_emb=rotary_pos_emb
        )
        added = _scaled(mixed, self.factor) + _scaled(attended, self.attention_factor)
        return hidden_states + added

    def branch(
        self, attention_mask: Tensor | None, context: BaseInferenceContext | None, angles: Tensor | None
    ) -> Branch | None:
        """Return None: two mixers with separate factors cannot be a branch."""
        return None


def _scaled(mixed: MixerOutput, factor: float) -> Tensor:
    output, bias = mixed
    if bias is not None:
        output = output + bias
    return output if factor == 1.0 else output * factor
