"""Layer specs that need only torch; used as `--spec megatron_ext.mcore.layer_specs hybrid_stack_spec`.

In distributed checkpoints a norm has the key of Megatron's own models, where Transformer Engine fuses it into the
linear layer after it; upstream's local specs of GPT do the same.
"""

from __future__ import annotations

import importlib

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayerSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_ext.config import RECURRENT_KINDS
from megatron_ext.config.recurrent import RecurrentKind
from megatron_ext.mcore.layers.attention import NormedSelfAttention, PagedSelfAttention, WindowedSelfAttention
from megatron_ext.mcore.layers.linear import ColumnLinear, RowLinear
from megatron_ext.mcore.layers.mlp import NormedMLP, PlainMLP
from megatron_ext.mcore.layers.moe import LocalMoELayer
from megatron_ext.mcore.layers.norms import KeyNormFromConfig, LayerNormFromConfig, QueryNormFromConfig
from megatron_ext.mcore.layers.residual_layers import (
    AttentionLayer,
    FeedForwardLayer,
    ParallelLayer,
    ParallelLayerSubmodules,
    RecurrentLayer,
)
from megatron_ext.mcore.layers.stack import HybridStack, HybridStackSubmodules
from megatron_ext.mixers.mixer import MixerSubmodules

# Here and below a class replaces a spec: upstream accepts classes that it does not know unchanged, but warns about
# specs of them.


def _feed_forward_spec(mlp: type, **parts: object) -> ModuleSpec:
    """Return the spec of an MLP, or a mixture of experts, with its residual and further parts."""
    submodules = TransformerLayerSubmodules(mlp=mlp, mlp_bda=get_bias_dropout_add, **parts)
    return ModuleSpec(module=FeedForwardLayer, submodules=submodules)


def _mixer_spec(kind: RecurrentKind) -> ModuleSpec:
    module, name = kind.mixer
    submodules = MixerSubmodules(in_proj=ColumnLinear, out_proj=RowLinear, out_norm=LayerNormFromConfig)
    return ModuleSpec(module=getattr(importlib.import_module(module), name), submodules=submodules)


def recurrent_layer_spec(kind: RecurrentKind) -> ModuleSpec:
    """Return the spec of a norm and the kind's mixer, with their residual."""
    return ModuleSpec(
        module=RecurrentLayer,
        submodules=MambaLayerSubmodules(
            norm=LayerNormFromConfig,
            mixer=_mixer_spec(kind),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _attention_spec(module: type) -> ModuleSpec:
    return ModuleSpec(
        module=module,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=DotProductAttention,
            linear_proj=RowLinear,
            q_layernorm=QueryNormFromConfig,
            k_layernorm=KeyNormFromConfig,
        ),
    )


def parallel_layer_spec(kind: RecurrentKind) -> ModuleSpec:
    """Return the spec of a norm, the kind's mixer and attention beside it, with their residual."""
    return ModuleSpec(
        module=ParallelLayer,
        submodules=ParallelLayerSubmodules(
            norm=LayerNormFromConfig,
            mixer=_mixer_spec(kind),
            mamba_bda=get_bias_dropout_add,
            self_attention=_attention_spec(PagedSelfAttention),
        ),
    )


def _attention_layer_spec(module: type, **parts: object) -> ModuleSpec:
    """Return the spec of attention with its residual and further parts."""
    attention = _attention_spec(module)
    submodules = TransformerLayerSubmodules(self_attention=attention, self_attn_bda=get_bias_dropout_add, **parts)
    return ModuleSpec(module=AttentionLayer, submodules=submodules)


def stack_spec(kind: RecurrentKind) -> ModuleSpec:
    """Return the spec of a stack whose recurrent layers, M and P in the pattern, are of one kind."""
    attention_norm = {
        "input_layernorm": LayerNormFromConfig,
        "sharded_state_dict_keys_map": {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    }
    mlp_norm = {
        "pre_mlp_layernorm": LayerNormFromConfig,
        "sharded_state_dict_keys_map": {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"},
    }
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=recurrent_layer_spec(kind),
            attention_layer=_attention_layer_spec(PagedSelfAttention, **attention_norm),
            mlp_layer=_feed_forward_spec(PlainMLP, **mlp_norm),
            moe_layer=_feed_forward_spec(LocalMoELayer, pre_mlp_layernorm=LayerNormFromConfig),
            parallel_layer=parallel_layer_spec(kind),
            normed_attention_layer=_attention_layer_spec(NormedSelfAttention),
            normed_mlp_layer=_feed_forward_spec(NormedMLP),
            windowed_attention_layer=_attention_layer_spec(WindowedSelfAttention, **attention_norm),
        ),
    )


def __getattr__(name: str) -> ModuleSpec:
    """Return a stack spec by the name in its kind: `hybrid_stack_spec` (Mamba-2) and so on."""
    for kind in RECURRENT_KINDS.values():
        if kind.stack_spec == name:
            return stack_spec(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
