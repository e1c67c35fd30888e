"""Models on any layout of ranks, without a file: the whole parameters, and each rank's part of them.

A rank's part follows from its model's `sharded_state_dict`: global keys, shapes and offsets; nothing of our own
loaders is used.
"""

from __future__ import annotations

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.mamba import MambaModel
from torch import Tensor

Whole = dict[str, Tensor]


def whole_parameters(model: MambaModel) -> Whole:
    """The global tensors of a model that is on one rank, by key."""
    whole: Whole = {}
    for shard in _shards(model):
        target = whole.setdefault(shard.key, torch.full(shard.global_shape, torch.nan, dtype=shard.dtype))
        target[_place(shard)] = _data(shard)
    assert not any(tensor.isnan().any() for tensor in whole.values()), "a part is missing"
    return whole


def fill(model: MambaModel, whole: Whole) -> None:
    """Give a rank's model its part of the whole parameters."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(torch.nan)
        for shard in _shards(model):
            assert tuple(shard.global_shape) == tuple(whole[shard.key].shape), shard.key
            _data(shard).copy_(whole[shard.key][_place(shard)])
    assert not any(tensor.isnan().any() for tensor in model.parameters()), "a parameter is in no checkpoint"


def _shards(model: MambaModel) -> list[ShardedTensor]:
    state = model.sharded_state_dict()
    apply_factories(state)
    return [shard for shard in nested_values(state) if isinstance(shard, ShardedTensor)]


def _place(shard: ShardedTensor) -> tuple[slice | int, ...]:
    """Place of the shard in the global tensor, without prepended axes."""
    own = zip(shard.global_offset[shard.prepend_axis_num :], shard.local_shape, strict=True)
    return (*shard.global_offset[: shard.prepend_axis_num], *(slice(first, first + size) for first, size in own))


def _data(shard: ShardedTensor) -> Tensor:
    """A view of the parameter."""
    assert shard.data is not None
    return shard.data.detach()
