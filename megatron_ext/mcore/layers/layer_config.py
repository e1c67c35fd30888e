"""megatron-core's configuration, and what its layers are told here besides."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from megatron.core.transformer import TransformerConfig


@dataclass
class LayerConfig(TransformerConfig):
    """`TransformerConfig` with settings of layers that it has no field for.

    Attributes:
        embedding_multiplier: This and the other multipliers as in `ModelConfig`.
        logits_multiplier: See above.
        residual_multiplier: See above.
        attention_output_multiplier: See above.
        recurrent_output_multiplier: See above.
        mlp_output_multiplier: See above.
        qk_layernorm_over_heads: Norms of queries and of keys are over all heads together.
        add_attention_output_bias: Of the projection behind attention, and of queries, keys and values.
        add_mlp_bias: Of MLPs that are no experts.
        attention_window: Tokens that a query sees in layers with a window, its own the last of them.
        rotary_magnitude: What rotated queries and keys are multiplied by, in our forward.
        yarn_rotary_scaling_factor: This and the next two say the same to upstream's forward; 1 is a magnitude of 1.
        yarn_mscale: See above.
        yarn_mscale_all_dim: See above.
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
    """The same configuration, or a copy with biases in linear layers if the setting called `wanted` is on."""
    if not getattr(config, wanted, False):
        return config
    changed = copy.copy(config)
    changed.add_bias_linear = True
    return changed
