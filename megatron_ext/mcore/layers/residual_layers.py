"""Residual layers reduced to their arithmetic at inference: x + factor * mixer(norm(x)), the factor mostly being 1.

Upstream's layers serve recomputation, offloading, CUDA graphs, fp8 and dropout, and check for each of them in every
call. These layers do so in training; in inference mode, if the configuration enables none of these, they only add the
mixer's output to the input. Parameters, names and checkpoints are upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_ext.mcore.layers.layer_config import LayerConfig

MixerOutput = tuple[Tensor, Tensor | None]  # output, and a bias still to be added
AddBuilder = Callable[..., Callable[..., Tensor]]  # as upstream's `get_bias_dropout_add`


def is_plain_inference(module: torch.nn.Module) -> bool:
    """Return whether a layer can be computed without the extra features of upstream's forward."""
    return torch.is_inference_mode_enabled() and not module.training and _wants_nothing_else(module.config)


def _wants_nothing_else(config: TransformerConfig) -> bool:
    return not (
        config.fp8
        or config.fp4
        or config.inference_fuse_tp_communication
        or config.mlp_chunks_for_prefill > 1
        or config.cuda_graph_impl != "none"
    )


def add_residual(mixed: MixerOutput, residual: Tensor, factor: float = 1.0) -> Tensor:
    """Return `factor` times the mixer's output and bias, plus the residual; overwrites the unshared output."""
    output, bias = mixed
    if bias is not None:
        output.add_(bias)
    if factor != 1.0:
        output.mul_(factor)
    return output.add_(residual)


@dataclass(frozen=True)
class Branch:
    """Layer as x + factor * mix(norm(x)), for callers that fuse a sum with the norm after it.

    Attributes:
        norm: [s, b, h] -> [s, b, h].
        mix: Normed states -> output to add, and its bias.
        factor: Factor of the output and bias.
    """

    norm: torch.nn.Module
    mix: Callable[[Tensor], MixerOutput]
    factor: float

    def run(self, hidden_states: Tensor) -> Tensor:
        """Compute the layer, [s, b, h] -> [s, b, h]."""
        return add_residual(self.mix(self.norm(hidden_states)), hidden_states, self.factor)


class Branching:
    """Layer that can describe itself as a `Branch`."""

    def branch(
        self, attention_mask: Tensor | None, context: BaseInferenceContext | None, angles: Tensor | None
    ) -> Branch | None:
        """Return the layer's branch in a step; None to call the layer directly. `angles` cover all positions."""
        raise NotImplementedError


def scaled_add(add: AddBuilder, factor: float) -> AddBuilder:
    """Return a residual-add builder that multiplies the mixer's output and bias by `factor` first."""
    if factor == 1.0:
        return add

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        def run(mixed: MixerOutput, residual: Tensor, probability: float) -> Tensor:
            output, bias = mixed
            scaled = (output * factor, None if bias is None else bias * factor)
            return add(training, fused)(scaled, residual, probability)

        return run

    return build


class RecurrentLayer(MambaLayer, Branching):
    """Norm and recurrent mixer."""

    mamba_bda: AddBuilder

    def __init__(self, config: LayerConfig, *args: object, **options: object) -> None:
        super().__init__(config, *args, **options)
        self.factor = config.residual_multiplier * config.recurrent_output_multiplier
        self.mamba_bda = scaled_add(self.mamba_bda, self.factor)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | None = None,
        **options: object,
    ) -> Tensor:
        """Compute [s, b, h] -> [s, b, h]; see `RecurrentMixer.forward`."""
        branch = self.branch(attention_mask, inference_context, rotary_pos_emb)
        if branch is None:
            return super().forward(hidden_states, attention_mask, inference_context, rotary_pos_emb, **options)
        return branch.run(hidden_states)

    def branch(
        self, attention_mask: Tensor | None, context: BaseInferenceContext | None, angles: Tensor | None
    ) -> Branch | None:
        """Return the layer's branch; see `Branching`."""
        if not is_plain_inference(self) or getattr(self, "residual_in_fp32", False):  # 0.16 only
            return None
        return Branch(self.norm, partial(self.mixer, inference_context=context), self.factor)


class AttentionLayer(TransformerLayer, Branching):
    """Norm and self-attention."""

    self_attn_bda: AddBuilder

    def __init__(self, config: LayerConfig, *args: object, **options: object) -> None:
        super().__init__(config, *args, **options)
        self.factor = config.residual_multiplier * config.attention_output_multiplier
        self.self_attn_bda = scaled_add(self.self_attn_bda, self.factor)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | None = None,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute [s, b, h] -> [s, b, h], and no context of cross-attention; see `PagedSelfAttention.forward`."""
        branch = self.branch(attention_mask, inference_context, rotary_pos_emb)
        if branch is None:
            return super().forward(
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                inference_context=inference_context,
                rotary_pos_emb=rotary_pos_emb,
                **options,
            )
        return branch.run(hidden_states), None

    def branch(
        self, attention_mask: Tensor | None, context: BaseInferenceContext | None, angles: Tensor | None
    ) -> Branch | None:
        """Return the layer's branch; see `Branching`."""
        if not is_plain_inference(self) or not isinstance(self.mlp, IdentityOp):
            return None
        options = {"attention_mask": attention_mask, "inference_context": context, "rotary_pos_emb": angles}
        return Branch(self.input_layernorm, partial(self.self_attention, **options), self.factor)


class FeedForwardLayer(MLPLayer, Branching):
    """Norm and an MLP, or a mixture of experts; `is_mtp_layer` of main's stacks only counts in training."""

    mlp_bda: AddBuilder

    def __init__(self, config: LayerConfig, *args: object, is_mtp_layer: bool = False, **options: object) -> None:
        super().__init__(config, *args, **options)
        self.factor = config.residual_multiplier * config.mlp_output_multiplier
        self.mlp_bda = scaled_add(self.mlp_bda, self.factor)

    def forward(self, hidden_states: Tensor, *positional: object, **options: object) -> tuple[Tensor, Tensor | None]:
        """Compute [s, b, h] -> [s, b, h], and no context of cross-attention."""
        branch = None if options.get("padding_mask") is not None else self.branch(None, None, None)
        if branch is None:
            return super().forward(hidden_states, *positional, **options)
        return branch.run(hidden_states), None

    def branch(
        self, attention_mask: Tensor | None, context: BaseInferenceContext | None, angles: Tensor | None
    ) -> Branch | None:
        """Return the layer's branch; see `Branching`."""
        if not is_plain_inference(self) or not isinstance(self.self_attention, IdentityOp):
            return None
        return Branch(self.pre_mlp_layernorm, self.mlp, self.factor)
