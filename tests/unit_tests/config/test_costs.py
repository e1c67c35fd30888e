"""SI-3: operations to compute tokens, by the layers of a model."""

from __future__ import annotations

import pytest

from megatron_ext.config import ModelConfig
from megatron_ext.config.costs import EntryCosts, entry_costs
from megatron_ext.models.size import matrix_parameter_count


@pytest.mark.parametrize("pattern", ["M-*-", "****", "-M-M"])
def test_a_token_costs_two_operations_for_each_parameter_that_it_meets(pattern: str):
    """SI-3: no operation is subtracted; states count by their inner width; embeddings are looked up, not computed."""
    config = ModelConfig(hybrid_override_pattern=pattern, hidden_size=128, mamba_num_groups=2, vocab_size=100)
    costs = entry_costs(config, 16, 1, 1)
    parameters = matrix_parameter_count(config) - 100 * 128
    states = pattern.count("M") * 6 * config.mamba_heads * config.mamba_head_dim * config.mamba_state_dim
    assert costs.token_flops == 2 * parameters + states
    assert costs.position_flops == pattern.count("*") * 4 * 128


def test_a_token_meets_a_windows_keys_wherever_it_stands():
    """SI-3: the cost of attention in a window does not grow with the position; that of the other layer does."""
    sizes = {"hidden_size": 128, "mamba_num_groups": 2, "vocab_size": 100, "attention_window": 48}
    costs = entry_costs(ModelConfig(hybrid_override_pattern="*WW-", **sizes), 16, 1, 1)
    whole = entry_costs(ModelConfig(hybrid_override_pattern="***-", **sizes | {"attention_window": None}), 16, 1, 1)
    assert costs.position_flops == 4 * 128
    assert costs.token_flops == whole.token_flops + 2 * 48 * 4 * 128


def test_a_token_meets_its_experts_only():
    """SI-3: router and chosen experts."""
    sizes = {"hybrid_override_pattern": "E", "hidden_size": 64, "num_attention_heads": 4, "moe_ffn_hidden_size": 32}
    few = entry_costs(ModelConfig(num_experts=8, moe_router_topk=2, **sizes), 16, 1, 1)
    assert few.token_flops == 2 * (8 * 64 + 2 * 2 * 64 * 32)


def test_operations_are_those_of_every_token():
    """SI-3: a sum over positions."""
    costs = EntryCosts(token_flops=3.0, position_flops=0.25)
    assert costs.flops(3, 11) == pytest.approx(sum(3.0 + 0.25 * position for position in range(3, 11)))
    assert costs.flops(5, 5) == 0
