"""Weight shards: the part of a whole tensor that each tensor of a rank is.

megatron-core's description for distributed checkpoints says where a rank's tensor lies in the whole. This module reads
that description for files that hold whole tensors, under their names in the model of one rank. In those names

    decoder.layers.{n}.                  n counts the layers of all stages
    ...experts.local_experts.{n}.        n counts the experts of all ranks
    embedding.word_embeddings.weight     is also the last stage's output_layer.weight, if it is tied

Some tensors concatenate several parts by rows, each of which is split over the ranks separately: a gated MLP's gate and
up projection, the rows of z, x, B, C and dt of a Mamba-2 input projection. A rank has several pieces of such a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.packed_weights import make_writable, unpack_weights
from megatron_ext.mcore.weight_changes import saved_tensors
from megatron_ext.parallel.collectives import gathered

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """Box of the whole tensor, and the same box of this rank's tensor."""

    whole: Box
    local: Box

    def up_to(self, rows: int) -> Piece | None:
        """Return the piece without the whole tensor's rows from `rows` on; None if nothing remains."""
        first, here = self.whole[0].start, self.local[0]
        count = min(self.whole[0].stop, rows) - first
        if count <= 0:
            return None
        return Piece(
            (slice(first, first + count), *self.whole[1:]), (slice(here.start, here.start + count), *self.local[1:])
        )


@dataclass(frozen=True)
class ShardSpec:
    """Shard of a whole tensor that a tensor of this rank holds.

    Attributes:
        name: Name of the whole tensor in the model of one rank.
        shape: Shape of the whole tensor.
        pieces: Pieces in the order of this rank's rows. They cover all rows but those after the vocabulary, which are
            zeros.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's tensor of the whole one; a view if the shard is one piece."""
        parts = [whole[piece.whole] for piece in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def up_to(self, rows: int) -> ShardSpec:
        """Return the shard of a whole tensor with at most `rows` rows."""
        pieces = [piece.up_to(rows) for piece in self.pieces]
        return ShardSpec(self.name, (rows, *self.shape[1:]), tuple(piece for piece in pieces if piece is not None))


def model_shards(model: HybridModel) -> dict[str, ShardSpec]:
    """Return the shard of every tensor of a checkpoint that this rank has, by its name on this rank."""
    if not is_sharded(model.config):
        return {name: whole_shard(name, tensor.shape) for name, tensor in saved_tensors(model).items()}
    described = requested_state(model)
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    experts = _first_expert(model)
    shards = {name: _shard(_whole_name(name, model, numbers, experts), one) for name, one in described.items()}
    return {
        name: shard.up_to(model.entries) if shard.name in (EMBEDDING, OUTPUT) else shard
        for name, shard in shards.items()
    }


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's checkpoint tensors by name: parameters (shared ones once) and persistent buffers.

    They can be read, and written under `torch.no_grad`, until the next step: packed weights are unpacked first. While
    an engine runs only its thread may call this; `saved_tensors` has names and shapes for any thread.

    Raises:
        ConfigError: The weights are quantized.
    """
    unpack_weights(model)
    return saved_tensors(model)


def writable_tensors(model: nn.Module, names: Container[str]) -> dict[str, Tensor]:
    """Return the checkpoint tensors of these names, which the caller overwrites completely, by name.

    Packed and quantized weights among them are given up: they are packed again, from the new values, before the next
    step. May be called as `model_tensors`.
    """
    make_writable(model, names)
    return {name: tensor for name, tensor in saved_tensors(model).items() if name in names}


def zero_padding(target: Tensor, shard: ShardSpec) -> None:
    """Set this rank's rows after the vocabulary to zero, if it has any, before the others are filled."""
    if sum(math.prod(side.stop - side.start for side in piece.local) for piece in shard.pieces) < target.numel():
        target.zero_()


def is_sharded(config: TransformerConfig) -> bool:
    """Return whether a rank has less than the whole model."""
    sizes = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.expert_model_parallel_size,
        config.expert_tensor_parallel_size,
    )
    return max(sizes) > 1


def whole_shard(name: str, shape: Iterable[int]) -> ShardSpec:
    """Return the shard that is the whole tensor."""
    box = tuple(slice(0, size) for size in shape)
    return ShardSpec(name, tuple(shape), (Piece(box, box),))


def requested_state(
    model: MegatronModule, *, singleton_local_shards: bool = False
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return the tensors that the model requests from a distributed checkpoint, by local name; without objects."""
    described = model.sharded_state_dict(metadata={"singleton_local_shards": singleton_local_shards})
    return {name: one for name, one in described.items() if not isinstance(one, ShardedObject)}


def gathered_names(names: Iterable[str]) -> set[str]:
    """Return the union of the names of all ranks; every rank must call this."""
    return set().union(*gathered(sorted(set(names))))


def _shard(name: str, described: ShardedTensor | ShardedTensorFactory) -> ShardSpec:
    parts = [described] if isinstance(described, ShardedTensor) else list(nested_values({"": described.build()}))
    rows: dict[str, int] = {}  # by key of the global tensor: parts with the same key lie in the same tensor
    for part in parts:
        rows.setdefault(part.key, part.global_shape[part.prepend_axis_num] if part.local_shape else 1)
    first = dict(zip(rows, accumulate(rows.values(), initial=0), strict=False))
    pieces: list[Piece] = []
    local_row = 0
    for part in parts:
        offset, local = part.global_offset[part.prepend_axis_num :], tuple(part.local_shape)
        whole = [slice(start, start + size) for start, size in zip(offset, local, strict=True)]
        here = [slice(0, size) for size in local]
        if local:
            whole[0] = slice(first[part.key] + offset[0], first[part.key] + offset[0] + local[0])
            here[0] = slice(local_row, local_row + local[0])
            local_row += local[0]
        piece = Piece(tuple(whole), tuple(here))
        if local and pieces and pieces[-1].whole[0].stop == piece.whole[0].start:
            above = pieces.pop()
            piece = Piece(_joined(above.whole, piece.whole), _joined(above.local, piece.local))
        pieces.append(piece)
    rest = tuple(parts[0].global_shape[parts[0].prepend_axis_num :])
    return ShardSpec(name, (sum(rows.values()), *rest[1:]) if rest else (), tuple(pieces))


def _joined(above: Box, below: Box) -> Box:
    """Join two boxes, one below the other, into one."""
    assert above[1:] == below[1:], (above, below)
    return (slice(above[0].start, below[0].stop), *above[1:])


def _whole_name(name: str, model: HybridModel, numbers: list[int], first_expert: int) -> str:
    if name == OUTPUT and model.share_embeddings_and_output_weights:
        return EMBEDDING
    name = _LAYER.sub(lambda match: str(numbers[int(match[0])]), name)
    return _EXPERT.sub(lambda match: str(first_expert + int(match[0])), name)


def _first_expert(model: HybridModel) -> int:
    """Return the number of this rank's first expert, which is the same in all layers."""
    for module in model.modules():
        if isinstance(module, SequentialMLP):
            return module.ep_group.rank() * module.num_local_experts
    return 0
