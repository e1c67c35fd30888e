"""Embedding on the last pipeline stage, which layers of multi-token prediction read (SP-15).

A model's embedding is on its first stage. As in megatron-core, the last stage has a copy for these layers, under the
names of the first:

    embedding.word_embeddings.weight        unless it is tied: the rows of the output layer are the same
    embedding.position_embeddings.weight    if positions are learned
"""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_ext.mcore.layers.layer_config import LayerConfig


class OutputRows(nn.Module):
    """Embedding that reads its rows from an output layer, which has the parameter.

    Args:
        output_layer: Output layer of a tied model, with equal parts of the vocabulary on tensor-parallel ranks.
        group: Tensor-parallel ranks.
    """

    def __init__(self, output_layer: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self._output_layer = (output_layer,)  # in a tuple: a module would register it, and its parameter twice
        self._group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, [b, s] -> [b, s, h]."""
        weight = self._output_layer[0].get_parameter("weight")
        own = tokens - self._group.rank() * len(weight)
        is_here = (own >= 0) & (own < len(weight))
        found = weight[own.clamp(0, len(weight) - 1)] * is_here[..., None]
        if self._group.size() > 1:
            torch.distributed.all_reduce(found, group=self._group)
        return found


class LastStageEmbedding(MegatronModule):
    """Embedding of tokens, and of learned positions, on the last stage.

    Args:
        config: Settings of the trunk.
        rows: Rows of the vocabulary on all tensor-parallel ranks.
        positions: Number of learned positions; 0 without.
        output_layer: Output layer of a tied model; None if the embedding has a parameter of its own.
        group: Tensor-parallel ranks.

    Attributes:
        word_embeddings: Embedding of tokens.
        position_embeddings: Embedding of positions; None without.
    """

    def __init__(
        self, config: LayerConfig, rows: int, positions: int, output_layer: nn.Module | None, group: ProcessGroup
    ) -> None:
        super().__init__(config=config)
        self.word_embeddings: nn.Module
        if output_layer is None:
            self.word_embeddings = VocabParallelEmbedding(
                rows, config.hidden_size, init_method=config.init_method, config=config, tp_group=group
            )
        else:
            self.word_embeddings = OutputRows(output_layer, group)
        self.position_embeddings = nn.Embedding(positions, config.hidden_size) if positions else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings of tokens at their positions, [b, s] each -> [s, b, h]."""
        found: Tensor = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            found = found + self.position_embeddings(positions)
        return found.transpose(0, 1).contiguous()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Describe the parameters for a distributed checkpoint as copies, which the first stage writes."""
        described = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return {name: _as_copy(one) for name, one in described.items()}


def _as_copy(described: object) -> object:
    assert isinstance(described, ShardedTensor), f"{described} is not a parameter"
    assert isinstance(described.replica_id, tuple), "megatron-core numbers copies by stage, tensor and data rank"
    return dataclasses.replace(described, replica_id=(1, *described.replica_id[1:]))
