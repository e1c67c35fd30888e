"""Where a model's layers have their places in the pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from megatron.core.models.mamba import MambaModel

from megatron_ext.config import BatchingConfig
from megatron_ext.config.layers.letters import is_attention, is_recurrent
from megatron_ext.memory.engine_plan import ModelShape
from megatron_ext.memory.state_pool import StateShape

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LayerPlaces:
    """Local layer -> the how-manieth it is of those with keys and values, and of those with states.

    A layer that has both has a place in each.
    """

    kv: Mapping[int, int]
    states: Mapping[int, int]


def layer_places(model: MambaModel) -> LayerPlaces:
    """Of the layers on this stage."""
    letters = model.decoder.layer_type_list
    return LayerPlaces(_places(letters, is_attention), _places(letters, is_recurrent))


def _places(letters: list[str], is_one: Callable[[str], bool]) -> dict[int, int]:
    layers = [layer for layer, letter in enumerate(letters) if is_one(letter)]
    return {layer: place for place, layer in enumerate(layers)}


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
    places = layer_places(model)
    states = None
    if places.states:
        conv, ssm = model.decoder.mamba_state_shapes_per_request()
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
        kv_heads=kv_heads_of_rank(model.config.num_query_groups, model.decoder.tp_group.size()),
        head_channels=model.config.kv_channels,
        dtype=dtype,
        states=states,
    )
