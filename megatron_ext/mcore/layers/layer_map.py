"""Layer map: the index of each layer in the KV and state pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from megatron_ext.config import BatchingConfig
from megatron_ext.config.layers import is_attention, is_recurrent
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.layers.layer_config import LayerConfig
from megatron_ext.mcore.layers.stack import HybridStack
from megatron_ext.memory.engine_plan import ModelShape
from megatron_ext.memory.state_pool import StateShape

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LayerIndices:
    """Local layer -> its index among the layers with keys and values, and among those with states.

    A layer that has both has an index in each.
    """

    kv: Mapping[int, int]
    states: Mapping[int, int]


def layer_indices(letters: list[str]) -> LayerIndices:
    """Return the pool indices of a stack's layers."""
    return LayerIndices(_indices(letters, is_attention), _indices(letters, is_recurrent))


def _indices(letters: list[str], is_one: Callable[[str], bool]) -> dict[int, int]:
    layers = [layer for layer, letter in enumerate(letters) if is_one(letter)]
    return {layer: place for place, layer in enumerate(layers)}


def kv_heads_of_rank(groups: int, ranks: int) -> int:
    """Return the key/value heads on each tensor-parallel rank: its part, or one that several ranks hold."""
    return max(1, groups // ranks)


def model_shape(model: HybridModel, batching: BatchingConfig, dtype: torch.dtype) -> ModelShape:
    """Return the shape of an unwrapped model that the pools are sized by.

    Args:
        model: Model on this rank.
        batching: Sets the dtypes of states.
        dtype: Dtype of the parameters, of the KV cache, and of convolution states unless `batching` sets another.
    """
    channels = model.config.hidden_size if model.post_process else 0
    return replace(stack_shape(model.decoder, model.config, batching, dtype), output_channels=channels)


def stack_shape(stack: HybridStack, config: LayerConfig, batching: BatchingConfig, dtype: torch.dtype) -> ModelShape:
    """Return the shape of a stack of layers; see `model_shape`."""
    places = layer_indices(stack.layer_type_list)
    states = None
    if places.states:
        shapes = stack.mamba_state_shapes_per_request()
        assert shapes is not None, "there is a recurrent layer"
        conv, ssm = shapes
        conv_dtype = batching.conv_states_dtype
        states = StateShape(
            layers=len(places.states),
            conv=conv,
            ssm=ssm,
            conv_dtype=STATE_DTYPES[conv_dtype] if conv_dtype else dtype,
            ssm_dtype=STATE_DTYPES[batching.ssm_states_dtype],
        )
    return ModelShape(
        attention_layers=len(places.kv),
        kv_heads=kv_heads_of_rank(config.num_query_groups, stack.tp_group.size()),
        head_channels=config.kv_channels,
        dtype=dtype,
        states=states,
    )
