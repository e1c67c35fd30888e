"""Rows of a whole tensor that a rank has, and the contents of its other rows (MR-4)."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_ext.config import ParallelConfig
from megatron_ext.mcore.checkpoint.weight_shards import Piece, ShardSpec, model_shards, whole_shard, zero_padding


def test_padding_rows_of_the_vocabulary_become_zero():
    """MR-4: memory of a new tensor may hold anything; a tensor without such rows is left as it is."""
    whole = torch.arange(1.0, 21.0).view(5, 4)
    rows = Piece((slice(4, 8), slice(0, 4)), (slice(0, 4), slice(0, 4)))
    cut = ShardSpec("table", (8, 4), (rows,)).up_to(len(whole))
    assert cut == ShardSpec("table", (5, 4), (Piece((slice(4, 5), slice(0, 4)), (slice(0, 1), slice(0, 4))),))
    target = torch.full((4, 4), torch.nan)
    zero_padding(target, cut)
    assert torch.equal(target, torch.zeros(4, 4))
    full = torch.full((5, 4), 3.0)
    zero_padding(full, whole_shard("table", full.shape))
    assert torch.equal(full, torch.full((5, 4), 3.0))
    assert ShardSpec("table", (8, 4), (rows,)).up_to(4).pieces == ()


def test_shards_are_those_of_the_whole_model():
    """MR-4: a second stage that begins with the fourth layer, a second rank's experts, and rows without padding."""
    expert, output = "mlp.experts.local_experts.1.linear_fc1.weight", "output_layer.weight"
    offsets = {f"decoder.layers.0.{expert}": (), output: ((0, 1, 2),)}
    model = SimpleNamespace(
        config=ParallelConfig(tensor_model_parallel_size=2, expert_tensor_parallel_size=1),
        entries=5,
        share_embeddings_and_output_weights=False,
        decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=4)]),
        modules=lambda: [mock.Mock(spec=SequentialMLP, num_local_experts=2, ep_group=mock.Mock(rank=lambda: 1))],
        sharded_state_dict=lambda metadata: {
            name: ShardedTensor.from_rank_offsets(name, torch.zeros(4, 2), *place) for name, place in offsets.items()
        },
    )
    shards = model_shards(model)
    assert shards[f"decoder.layers.0.{expert}"] == whole_shard(
        f"decoder.layers.3.{expert.replace('1', '3', 1)}", (4, 2)
    )
    rows = Piece((slice(4, 5), slice(0, 2)), (slice(0, 1), slice(0, 2)))
    assert shards[output] == ShardSpec(output, (5, 2), (rows,))
