"""megatron-core's configuration with additional settings of our layers."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig


@dataclass
class LayerConfig(TransformerConfig):
    """`TransformerConfig` with layer settings that it has no field for.

    Attributes:
        embedding_multiplier: Factor of the embeddings; this and the other multipliers as in `ModelConfig`.
        logits_multiplier: Factor of the logits.
        residual_multiplier: Factor of every layer's output before the residual sum.
        attention_output_multiplier: Factor of attention outputs.
        recurrent_output_multiplier: Factor of recurrent mixers' outputs.
        mlp_output_multiplier: Factor of MLP outputs.
        qk_layernorm_over_heads: Norms of queries and of keys are over all heads together.
        add_attention_output_bias: Biases in the projection after attention, and in queries, keys and values.
        add_mlp_bias: Biases in MLPs other than experts.
        attention_window: Tokens that a query attends to in windowed layers, its own token the last of them.
        rotary_magnitude: Factor of rotated queries and keys in our forward.
        yarn_rotary_scaling_factor: With the next two, the magnitude for upstream's forward; 1 is a magnitude of 1.
        yarn_mscale: See `yarn_rotary_scaling_factor`.
        yarn_mscale_all_dim: See `yarn_rotary_scaling_factor`.
    """

    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_output_multiplier: float = 1.0
    recurrent_output_multiplier: float = 1.0
    mlp_output_multiplier: float = 1.0
    qk_layernorm_over_heads: bool = False
    add_attention_output_bias: bool = False
    add_mlp_bias: bool = False
    attention_window: int | None = None
    rotary_magnitude: float = 1.0
    yarn_rotary_scaling_factor: float = 1.0
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0


def with_biases(config: TransformerConfig, wanted: str) -> TransformerConfig:
    """Return the configuration, or a copy with biases in linear layers if the setting called `wanted` is on."""
    if not getattr(config, wanted, False):
        return config
    changed = copy.copy(config)
    changed.add_bias_linear = True
    return changed
