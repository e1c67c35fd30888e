"""Layers of multi-token prediction: heads that continue the trunk's hidden states by further tokens.

Depth d predicts token t + d + 1 from token t + d and the hidden state of depth d - 1 after token t; the trunk, with its
final norm, is depth 0:

    x = eh_proj([enorm(embedding(token t + d)) | hnorm(hidden state t)])
    hidden state t of depth d = final_layernorm(layers(x))

Embedding and output layer are the model's. Names match megatron-core's hybrid models; `models/megatron` maps the names
in its GPT models, whose layer is one transformer layer.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_ext.mcore.layers.layer_config import LayerConfig
from megatron_ext.mcore.layers.linear import ColumnLinear
from megatron_ext.mcore.layers.norms import LayerNormFromConfig
from megatron_ext.mcore.layers.stack import HybridStack, HybridStackSubmodules

Sharded = dict[str, object]


class PredictionLayer(MegatronModule):
    """Projection of a hidden state and an embedding, and the layers of one depth.

    Args:
        config: Settings of the trunk.
        submodules: Specs of the trunk's layers.
        pattern: One letter per layer of this depth.
        pg_collection: Process groups.
    """

    def __init__(
        self,
        config: LayerConfig,
        submodules: HybridStackSubmodules,
        pattern: str,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        width = config.hidden_size
        self.enorm = LayerNormFromConfig(config, width)
        self.hnorm = LayerNormFromConfig(config, width)
        self.eh_proj = ColumnLinear(
            2 * width,
            width,
            config=config,
            init_method=config.init_method,
            gather_output=True,
            bias=False,
            skip_bias_add=False,
            tp_group=pg_collection.tp,
        )
        self.mtp_model_layer = HybridStack(
            _of_one_stage(config, len(pattern)),
            submodules,
            layer_type_list=pattern,
            pg_collection=pg_collection,
            post_layer_norm=False,
        )
        self.final_layernorm = LayerNormFromConfig(config, width)

    def forward(
        self,
        hidden_states: Tensor,
        embedded: Tensor,
        context: BaseInferenceContext | None = None,
        angles: Tensor | None = None,
    ) -> Tensor:
        """Compute one depth, [s, b, h] -> [s, b, h].

        Args:
            hidden_states: Output of the depth before, [s, b, h].
            embedded: Embeddings of the tokens after them, [s, b, h].
            context: Positions, keys and states of a step; None for whole sequences.
            angles: Angles of the rotary embedding.
        """
        projected, _ = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden_states)), dim=-1))
        found: Tensor = self.final_layernorm(self.mtp_model_layer(projected, None, context, angles))
        return found


class MultiTokenPrediction(MegatronModule):
    """All depths of a model, on its last stage.

    Args:
        config: Settings of the trunk.
        submodules: Specs of the trunk's layers.
        pattern: One letter per layer of a depth.
        layer_count: Layers with weights of their own; a single one serves all depths.
        pg_collection: Process groups.
    """

    def __init__(
        self,
        config: LayerConfig,
        submodules: HybridStackSubmodules,
        pattern: str,
        layer_count: int,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.layers = nn.ModuleList(
            PredictionLayer(config, submodules, pattern, pg_collection) for _ in range(layer_count)
        )

    def forward(
        self,
        tokens: Tensor,
        hidden_states: Tensor,
        embedding: Callable[[Tensor, Tensor], Tensor],
        depths: int,
        angles: Tensor | None = None,
    ) -> list[Tensor]:
        """Compute the hidden states of whole sequences, [s - 1, b, h] of depth 1, [s - 2, b, h] of depth 2, ...

        Args:
            tokens: Token ids, [b, s].
            hidden_states: Output of the trunk after its final norm, [s, b, h].
            embedding: Token ids and positions, [b, s] each -> [s, b, h].
            depths: Number of depths; more than the layers repeat the last one.
            angles: Angles of the rotary embedding, [s, 1, 1, channels].
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        embedded = embedding(tokens, positions)
        found: list[Tensor] = []
        for depth in range(1, depths + 1):
            count = tokens.shape[1] - depth
            rotated = None if angles is None else angles[:count]
            layer = self.layer_of(depth)
            hidden_states = layer(hidden_states[:count], embedded[depth:], angles=rotated)
            found.append(hidden_states)
        return found

    def layer_of(self, depth: int) -> PredictionLayer:
        """Return the layer that computes a depth, counted from 1."""
        layer = self.layers[min(depth, len(self.layers)) - 1]
        assert isinstance(layer, PredictionLayer)
        return layer

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: dict[str, object] | None = None
    ) -> Sharded:
        """Describe the tensors of all layers for a distributed checkpoint, as upstream does for its own."""
        found: Sharded = {}
        for number in range(len(self.layers)):
            layer = self.layer_of(number + 1)
            found |= layer.sharded_state_dict(f"{prefix}layers.{number}.", sharded_offsets, metadata)
        return found


def _of_one_stage(config: LayerConfig, layers: int) -> LayerConfig:
    """Return a configuration by which layers are numbered from the first, whatever stage they are on."""
    alone = copy.copy(config)
    alone.num_layers, alone.pipeline_model_parallel_size, alone.pipeline_model_parallel_layout = layers, 1, None
    alone.num_layers_in_first_pipeline_stage = alone.num_layers_in_last_pipeline_stage = None
    return alone


class TiedEmbedding(nn.Module):
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
    """Embedding of tokens, and of learned positions, on the last pipeline stage (SP-15).

    A model's embedding is on its first stage. As in megatron-core, the last stage has a copy for these layers, under
    the names of the first:

        embedding.word_embeddings.weight        unless it is tied: the rows of the output layer are the same
        embedding.position_embeddings.weight    if positions are learned

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
            self.word_embeddings = TiedEmbedding(output_layer, group)
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
