"""Layers that do nothing beside their arithmetic at inference: x + mixer(norm(x)).

Upstream's layers serve recomputation, offloading, CUDA graphs, fp8 and dropout, and ask for each of them in every call.
Ours do so in training; in inference mode, where the configuration wants none of these, they add what the mixer gives to
what came in. Parameters, names and checkpoints are upstream's.
"""

from __future__ import annotations

import torch
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


def is_plain_inference(module: torch.nn.Module) -> bool:
    """Whether a layer is to be computed without what upstream's does around its arithmetic."""
    return torch.is_inference_mode_enabled() and not module.training and _wants_nothing_else(module.config)


def _wants_nothing_else(config: TransformerConfig) -> bool:
    return not (
        config.fp8
        or config.fp4
        or config.inference_fuse_tp_communication
        or config.mlp_chunks_for_prefill > 1
        or config.cuda_graph_impl != "none"
    )


def add_residual(mixed: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
    """The mixer's output, its bias and what came in; written over the output, which nobody else has."""
    output, bias = mixed
    if bias is not None:
        output.add_(bias)
    return output.add_(residual)


class RecurrentLayer(MambaLayer):
    """A norm and a recurrent mixer."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        **options: object,
    ) -> Tensor:
        """[s, b, h] -> the same; see `RecurrentMixer.forward`."""
        if not is_plain_inference(self) or self.residual_in_fp32:
            return super().forward(hidden_states, attention_mask, inference_context, **options)
        return add_residual(self.mixer(self.norm(hidden_states), inference_context), hidden_states)


class AttentionLayer(TransformerLayer):
    """A norm and self-attention."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | None = None,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> the same, and no context of cross-attention; see `PagedSelfAttention.forward`."""
        if not is_plain_inference(self) or not isinstance(self.mlp, IdentityOp):
            return super().forward(
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                inference_context=inference_context,
                rotary_pos_emb=rotary_pos_emb,
                **options,
            )
        mixed = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask,
            inference_context=inference_context,
            rotary_pos_emb=rotary_pos_emb,
        )
        return add_residual(mixed, hidden_states), None


class FeedForwardLayer(MLPLayer):
    """A norm and an MLP, or a mixture of them."""

    def forward(self, hidden_states: Tensor, *positional: object, **options: object) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> the same, and no context of cross-attention."""
        is_padded = options.get("padding_mask") is not None
        if not is_plain_inference(self) or is_padded or not isinstance(self.self_attention, IdentityOp):
            return super().forward(hidden_states, *positional, **options)
        return add_residual(self.mlp(self.pre_mlp_layernorm(hidden_states)), hidden_states), None
