"""Mamba-2 hybrid of the benchmark, built by megatron-core 0.19.2 without Transformer Engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

TAKEN = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_heads",
    "mamba_num_groups",
)
"""Fields whose names are the same in our configuration and in theirs."""


def configuration(shape: Mapping[str, Any], dtype: torch.dtype, graphs: bool) -> TransformerConfig:
    """Return the configuration for fields of our `ModelConfig`; whole steps are captured."""
    return TransformerConfig(
        num_layers=len(shape["hybrid_override_pattern"]),
        **{name: shape[name] for name in TAKEN},
        normalization="RMSNorm",
        add_bias_linear=False,
        activation_func=squared_relu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        is_hybrid_model=True,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_impl="local" if graphs else "none",
        inference_cuda_graph_scope="block" if graphs else "none",
    )


def stack_spec() -> ModuleSpec:
    """Layer specs of megatron-core with plain linear layers and torch's norms."""
    mixer = ModuleSpec(
        module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
        ),
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layers = {
        "mamba_layer": ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add),
        ),
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm, self_attention=attention, self_attn_bda=get_bias_dropout_add
            ),
        ),
        "mlp_layer": ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm,
                mlp=partial(MLP.as_mlp_submodule, submodules=linears),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    }
    return ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**layers))


def build(shape: Mapping[str, Any], dtype: torch.dtype, device: torch.device, graphs: bool) -> HybridModel:
    """Build the model with random weights, made on the device."""
    hybrid_block.TENorm = WrappedTorchNorm  # the last norm, which no spec names
    model = HybridModel(
        configuration(shape, dtype, graphs),
        stack_spec(),
        vocab_size=shape["vocab_size"],
        max_sequence_length=shape["max_position_embeddings"],
        hybrid_layer_pattern=shape["hybrid_override_pattern"],
        parallel_output=False,
        share_embeddings_and_output_weights=True,
        position_embedding_type="none",
    )
    return model.to(device=device, dtype=None).eval().requires_grad_(False)
