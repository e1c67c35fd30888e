"""megatron-core's configuration, and what its layers are told here besides."""

from __future__ import annotations

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
    """

    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_output_multiplier: float = 1.0
    recurrent_output_multiplier: float = 1.0
    mlp_output_multiplier: float = 1.0
    qk_layernorm_over_heads: bool = False
