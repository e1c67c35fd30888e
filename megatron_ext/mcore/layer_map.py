"""Where a model's layers have their places in the pools."""

from __future__ import annotations

import torch
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm.mamba_hybrid_layer_allocation import Symbols, get_layer_maps_from_layer_type_list

from megatron_ext.config import BatchingConfig
from megatron_ext.memory.plan import ModelShape
from megatron_ext.memory.state_pool import StateShape

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def layer_places(model: MambaModel) -> dict[int, int]:
    """Local layer -> the how-manieth of its kind it is, for attention layers and recurrent ones."""
    attention, recurrent, _, _ = get_layer_maps_from_layer_type_list(model.decoder.layer_type_list)
    return attention | recurrent


def kv_heads_of_rank(groups: int, ranks: int) -> int:
    """Key/value heads that each of some tensor-parallel ranks holds: its part, or one that others hold, too."""
    return max(1, groups // ranks)


def model_shape(model: MambaModel, batching: BatchingConfig, dtype: torch.dtype) -> ModelShape:
    """What the pools need to know of an unwrapped model.

    Args:
        model: On this rank.
        batching: Says which types states have.
        dtype: Of the parameters, of the KV cache, and of convolution states unless `batching` says otherwise.
    """
    layer_types = model.decoder.layer_type_list
    attention, recurrent, _, _ = get_layer_maps_from_layer_type_list(layer_types)
    states = None
    if Symbols.MAMBA in layer_types:
        conv, ssm = model.decoder.mamba_state_shapes_per_request()
        conv_dtype = batching.conv_states_dtype
        states = StateShape(
            layers=len(recurrent),
            conv=conv,
            ssm=ssm,
            conv_dtype=STATE_DTYPES[conv_dtype] if conv_dtype else dtype,
            ssm_dtype=STATE_DTYPES[batching.ssm_states_dtype],
        )
    return ModelShape(
        attention_layers=len(attention),
        kv_heads=kv_heads_of_rank(model.config.num_query_groups, model.decoder.tp_group.size()),
        head_channels=model.config.kv_channels,
        dtype=dtype,
        states=states,
    )
