"""Distributed checkpoint layout of a recurrent mixer's parameters, independent of the tensor-parallel size.

A rank stacks its rows of z, x, B, C and dt in one matrix. Written as one tensor split over the ranks, the parts of the
ranks would be interleaved, and another number of ranks could not read them. So each part is a separate global tensor,
`in_proj.weight.z` and so on: the keys that megatron-core's `MambaMixer` writes and reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

Offsets = tuple[tuple[int, int, int], ...]  # leading axes: (axis, this rank's index, number of shards)
Metadata = dict[str, object]


def split_rows(whole: ShardedTensor, sections: Mapping[str, int]) -> ShardedTensorFactory:
    """Write the rows of one tensor as several global tensors, each split over the ranks separately.

    Args:
        whole: This rank's tensor, split over the ranks along axis 0.
        sections: Rows of each part on this rank, in order, by part name; a part's key is `key.name`.
    """
    template = whole.without_data()
    assert sum(sections.values()) == template.local_shape[0], (sections, template)

    def build(key: str, tensor: Tensor, replica_id: object, flattened_range: slice | None) -> list[ShardedTensor]:
        described = dataclasses.replace(
            template, data=tensor, dtype=tensor.dtype, replica_id=replica_id, flattened_range=flattened_range
        )
        parts, start = [], 0
        for name, rows in sections.items():
            parts += [dataclasses.replace(part, key=f"{key}.{name}") for part in described.narrow(0, start, rows)]
            start += rows
        return parts

    def merge(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts))

    return ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)


def sharded_mixer_state(
    mixer: nn.Module,
    split: Mapping[str, Mapping[str, int]],
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: Metadata | None = None,
    replicated: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> ShardedStateDict:
    """Return a mixer's sharded state: projections by their own rules, the rest split over the ranks along axis 0.

    Args:
        mixer: Module with `in_proj`, `out_proj` and the tensor-parallel group `tp_group`.
        split: `sections` by parameter name, see `split_rows`.
        prefix: Prefix of every name.
        sharded_offsets: Axes before the tensors' own, as megatron-core passes them.
        metadata: Checkpoint metadata, as megatron-core passes it.
        replicated: Name prefixes of parameters that every rank holds whole.
        columns: Names of parameters that are split along axis 1 instead.
    """
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    projections = ("in_proj.", "out_proj.")
    own = {name: value for name, value in mixer.state_dict(keep_vars=True).items() if not name.startswith(projections)}
    groups = {"tp_group": mixer.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
    axes = {name: int(name in columns) for name in own if not name.startswith(tuple(replicated))}
    state = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
    for name in ("in_proj", "out_proj"):
        module = getattr(mixer, name)
        state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, mixer.tp_group)
    for name, sections in split.items():
        state[prefix + name] = split_rows(state[prefix + name], sections)
    return state
