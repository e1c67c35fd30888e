"""Post-norm attention and MLPs: the norm is applied to their output, none to their input."""

from __future__ import annotations

from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.mcore.layers.attention import PagedSelfAttention
from megatron_ext.mcore.layers.mlp import PlainMLP
from megatron_ext.mcore.layers.norms import LayerNormFromConfig


class OutputNorm(MegatronModule):
    """Norm that can be a part of an MLP: upstream's MLP asks each of its parts for its sharded state."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.norm = LayerNormFromConfig(config, config.hidden_size)

    def forward(self, output: Tensor, bias: Tensor | None) -> Tensor:
        """Normalize the sum of output [s, b, h] and bias -> [s, b, h]."""
        normed: Tensor = self.norm(output if bias is None else output + bias)
        return normed


class NormedSelfAttention(PagedSelfAttention):
    """`PagedSelfAttention` with an output norm."""

    def __init__(self, config: TransformerConfig, *args: object, **options: object) -> None:
        super().__init__(config, *args, **options)
        self.output_norm = OutputNorm(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend and normalize the output, see `PagedSelfAttention.forward`; return None as bias."""
        output, bias = super().forward(
            hidden_states, attention_mask, key_value_states, inference_context, rotary_pos_emb, **kwargs
        )
        return self.output_norm(output, bias), None


class NormedMLP(PlainMLP):
    """`PlainMLP` with an output norm."""

    def __init__(
        self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection | None = None, **options: object
    ) -> None:
        super().__init__(config, pg_collection=pg_collection, **options)
        self.output_norm = OutputNorm(config)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute as upstream and normalize; return None as bias."""
        return self.output_norm(*super().forward(hidden_states, per_token_scale, **options)), None
