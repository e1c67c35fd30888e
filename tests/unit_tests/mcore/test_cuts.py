"""Rows of a whole tensor that a rank has, and the contents of its other rows (MR-4)."""

from __future__ import annotations

import torch

from megatron_ext.mcore.checkpoint.weight_shards import Piece, ShardSpec, whole_shard, zero_padding


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
