"""Residual layers reduced to their arithmetic at inference: x + factor * mixer(norm(x)), the factor mostly being 1.

Upstream's layers serve recomputation, offloading, CUDA graphs, fp8 and dropout, and check for each of them in every
call. These layers do so in training; in inference mode, if the configuration enables none of these, they only add the
mixer's output to the input. Parameters, names and checkpoints are upstream's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_ext.mcore.layers.layer_config import LayerConfig
from megatron_ext.ops.gated_norm import add_and_norm

MixerOutput = tuple[Tensor, Tensor | None]  # output, and a bias still to be added
AddBuilder = Callable[..., Callable[..., Tensor]]  # as upstream's `get_bias_dropout_add`
LayerInputs = Mapping[str, object]
"""Arguments of a layer's forward beside hidden states: `attention_mask`, `inference_context`, `rotary_pos_emb`."""


def is_plain_inference(module: torch.nn.Module) -> bool:
    """Return whether a layer can be computed without the extra features of upstream's forward."""
    config: TransformerConfig = module.config
    return (torch.is_inference_mode_enabled() and not module.training) and not (
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
class ResidualBranch:
    """Layer as x + factor * mix(norm(x)), for callers that fuse a sum with the norm after it.

    Attributes:
        norm: [s, b, h] -> [s, b, h].
        mix: Normed states -> output to add, and its bias.
        factor: Factor of the output and bias.
    """

    norm: torch.nn.Module
    mix: Callable[[Tensor], MixerOutput]
    factor: float


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


class ResidualLayer(nn.Module):
    """Layer that a step computes as a `ResidualBranch`; listed before upstream's layer among the bases.

    Attributes:
        multiplier: Field of the configuration with a factor of the layer's output, beside `residual_multiplier`.
        sum_builder: Attribute with upstream's builder of the residual sum, which applies both.
    """

    multiplier: str
    sum_builder: str

    def __init__(self, config: LayerConfig, *args: object, **options: object) -> None:
        super().__init__(config, *args, **options)
        self.factor: float = config.residual_multiplier * getattr(config, self.multiplier)
        setattr(self, self.sum_builder, scaled_add(getattr(self, self.sum_builder), self.factor))

    def branch(self, inputs: LayerInputs) -> ResidualBranch | None:
        """Return the layer's branch in a step at inference; None to call the layer."""
        raise NotImplementedError


class RecurrentLayer(ResidualLayer, MambaLayer):
    """Norm and recurrent mixer; see `RecurrentMixer.forward`."""

    multiplier, sum_builder = "recurrent_output_multiplier", "mamba_bda"
    norm: nn.Module
    mixer: nn.Module

    def branch(self, inputs: LayerInputs) -> ResidualBranch | None:
        """Return the layer's branch; see `ResidualLayer`."""
        return ResidualBranch(self.norm, partial(self.mixer, **inputs), self.factor)


class AttentionLayer(ResidualLayer, TransformerLayer):
    """Norm and self-attention; see `PagedSelfAttention.forward`."""

    multiplier, sum_builder = "attention_output_multiplier", "self_attn_bda"
    input_layernorm: nn.Module
    self_attention: nn.Module

    def branch(self, inputs: LayerInputs) -> ResidualBranch | None:
        """Return the layer's branch; see `ResidualLayer`."""
        if not isinstance(self.mlp, IdentityOp):
            return None
        return ResidualBranch(self.input_layernorm, partial(self.self_attention, **inputs), self.factor)


class FeedForwardLayer(ResidualLayer, MLPLayer):
    """Norm and an MLP, or a mixture of experts; `is_mtp_layer` of main's stacks only counts in training."""

    multiplier, sum_builder = "mlp_output_multiplier", "mlp_bda"
    pre_mlp_layernorm: nn.Module
    mlp: nn.Module

    def __init__(self, config: LayerConfig, *args: object, is_mtp_layer: bool = False, **options: object) -> None:
        super().__init__(config, *args, **options)

    def branch(self, inputs: LayerInputs) -> ResidualBranch | None:
        """Return the layer's branch; see `ResidualLayer`."""
        if not isinstance(self.self_attention, IdentityOp):
            return None
        return ResidualBranch(self.pre_mlp_layernorm, self.mlp, self.factor)


class ResidualStream:
    """Hidden states of a step as they pass through the layers; a sum is deferred so that one kernel adds and norms.

    Args:
        hidden_states: [s, b, h]; not overwritten.
        is_plain: Whether layers may be computed as branches; see `is_plain_inference`.
    """

    def __init__(self, hidden_states: Tensor, *, is_plain: bool) -> None:
        self._states, self._is_plain = hidden_states, is_plain
        self._waiting: tuple[MixerOutput, float] | None = None  # deferred summand and its factor

    def through(self, layer: nn.Module, inputs: LayerInputs) -> None:
        """Compute a layer; a branch's sum is deferred. Layers with hooks are called normally."""
        branch = None
        if self._is_plain and isinstance(layer, ResidualLayer) and not forward_hooks(layer):
            branch = layer.branch(inputs)
        if branch is not None:
            self._waiting = branch.mix(self.normed(branch.norm)), branch.factor
            return
        found = layer(self.states(), **inputs)
        self._states = found[0] if isinstance(found, tuple) else found

    def states(self) -> Tensor:
        """Return the hidden states with all sums done, [s, b, h]."""
        if self._waiting is not None:
            mixed, factor = self._waiting
            self._states, self._waiting = add_residual(mixed, self._states, factor), None
        return self._states

    def normed(self, norm: nn.Module) -> Tensor:
        """Return a norm of the hidden states with all sums done, [s, b, h]."""
        if self._waiting is not None:
            (output, bias), factor = self._waiting
            found = add_and_norm(output, self._states, norm, factor) if bias is None else None
            if found is not None:
                (self._states, normed), self._waiting = found, None
                return normed
        normed_states: Tensor = norm(self.states())
        return normed_states


def forward_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """Return the hooks that run before and after the forward of a module itself; torch has no public list of them."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


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

    def branch(self, inputs: LayerInputs) -> ResidualBranch | None:
        """Return None: two mixers with separate factors cannot be a branch."""
        return None


def _scaled(mixed: MixerOutput, factor: float) -> Tensor:
    output, bias = mixed
    if bias is not None:
        output = output + bias
    return output if factor == 1.0 else output * factor
