"""Parallel linear layers at inference: the product, and one collective where several ranks share it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_ext.config import ModelConfig
from megatron_ext.mcore.layers import linear
from megatron_ext.mcore.layers.linear import ColumnLinear, RowLinear
from megatron_ext.models.build import transformer_config
from tests.unit_tests.support.tensor_parallel import as_rank

INPUTS, OUTPUTS, RANKS = 12, 20, 2
CONFIG = transformer_config(
    ModelConfig(hybrid_override_pattern="*", hidden_size=16, num_attention_heads=2, vocab_size=8), torch.float32
)
X = torch.randn(5, 1, INPUTS, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(2))


def column(index: int, ranks: int, cls: type = ColumnLinear, **options: object) -> ColumnParallelLinear:
    with as_rank(index, ranks) as groups:
        made = cls(INPUTS, OUTPUTS, config=CONFIG, init_method=torch.nn.init.zeros_, tp_group=groups.tp, **options)
    width = OUTPUTS // ranks
    with torch.no_grad():
        made.weight.copy_(WEIGHT[index * width : (index + 1) * width])
        made.bias.copy_(BIAS[index * width : (index + 1) * width])
    return made


def row(index: int, ranks: int, cls: type = RowLinear, **options: object) -> RowParallelLinear:
    settings = {"bias": True, "input_is_parallel": True, "skip_bias_add": False} | options
    with as_rank(index, ranks) as groups:
        made = cls(INPUTS, OUTPUTS, config=CONFIG, init_method=torch.nn.init.zeros_, tp_group=groups.tp, **settings)
    width = INPUTS // ranks
    with torch.no_grad():
        made.weight.copy_(WEIGHT[:, index * width : (index + 1) * width])
        made.bias.copy_(BIAS)
    return made


@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("make", [column, row])
def test_one_rank(make, skip_bias_add):
    """SC-2: upstream's answers and gradients; at inference without any of its collectives."""
    ours = make(0, 1, skip_bias_add=skip_bias_add)
    theirs = make(0, 1, type(ours).__bases__[-1], skip_bias_add=skip_bias_add)
    for layer in (ours, theirs):
        layer(X)[0].square().sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    with torch.inference_mode(), mock.patch.object(torch.distributed, "all_reduce", side_effect=AssertionError):
        output, bias = ours(X)
    torch.testing.assert_close(output, F.linear(X, WEIGHT, None if skip_bias_add else BIAS))
    assert (bias is ours.bias) if skip_bias_add else (bias is None)


@torch.inference_mode()
def test_columns_of_several_ranks():
    """SC-2: each rank its outputs; gathered where asked, and not otherwise."""
    parts = [column(index, RANKS)(X)[0] for index in range(RANKS)]
    torch.testing.assert_close(torch.cat(parts, -1), F.linear(X, WEIGHT, BIAS))
    layer = column(1, RANKS)
    gathered = mock.Mock(side_effect=lambda part, group: torch.cat([parts[0], part], -1))
    with mock.patch.object(linear, "gather_from_tensor_model_parallel_region", gathered):
        torch.testing.assert_close(layer(X, runtime_gather_output=True)[0], F.linear(X, WEIGHT, BIAS))
        layer(X, runtime_gather_output=False)
    assert gathered.call_count == 1
    assert gathered.call_args.kwargs == {"group": layer.tp_group}


@torch.inference_mode()
def test_rows_of_several_ranks():
    """SC-2: rows of several ranks need one all-reduce, and add the bias once."""
    others = F.linear(X[..., INPUTS // 2 :], WEIGHT[:, INPUTS // 2 :])
    layer = row(0, RANKS)
    reduce = mock.Mock(side_effect=lambda part, group: part.add_(others))
    with mock.patch.object(torch.distributed, "all_reduce", reduce):
        output, bias = layer(X[..., : INPUTS // 2])
    torch.testing.assert_close(output, F.linear(X, WEIGHT, BIAS))
    assert bias is None
    assert reduce.call_count == 1
    assert reduce.call_args.kwargs == {"group": layer.tp_group}
