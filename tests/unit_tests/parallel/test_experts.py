"""MR-5: an MoE layer whose experts are spread over ranks, against the reference that one rank is tested with.

Ranks of one replica have equal tokens; replicas have other tokens, and another number of them. No replica has zero
tokens: a rank without work computes a dummy token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.models.build import build_model
from tests.unit_tests.support.moe import reference_moe, routing_margin
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.spread import Whole, fill, whole_parameters

pytestmark = pytest.mark.worlds

CPU = torch.device("cpu")
SIGMOID = ModelConfig(
    hybrid_override_pattern="E",
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_experts=8,
    moe_ffn_hidden_size=16,
    vocab_size=32,
    squared_relu=True,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    moe_shared_expert_intermediate_size=20,
)
CONFIGS = {
    "sigmoid, bias, shared experts": SIGMOID,
    "softmax, SwiGLU": dataclasses.replace(
        SIGMOID,
        swiglu=True,
        squared_relu=False,
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        moe_router_topk_scaling_factor=None,
        moe_shared_expert_intermediate_size=None,
    ),
    "latent": dataclasses.replace(SIGMOID, moe_latent_size=10),
    "one expert a token": dataclasses.replace(SIGMOID, moe_router_topk=1),
    "groups": dataclasses.replace(SIGMOID, moe_router_topk=4, moe_router_num_groups=4, moe_router_group_topk=2),
}


def sizes(tensor: int, expert: int, expert_tensor: int) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )


# What they show besides: ranks that share a layer and experts; that share a layer only; experts across replicas.
LAYOUTS = {
    "EP 2": (2, sizes(1, 2, 1)),
    "TP 2": (2, sizes(2, 1, 2)),
    "TP 2, whole experts": (2, sizes(2, 1, 1)),
    "TP 2 of layers, EP 2 of experts": (2, sizes(2, 2, 1)),
    "TP 2 x EP 2": (4, sizes(2, 2, 2)),
    "TP 4 of layers, TP 2 x EP 2 of experts": (4, sizes(4, 2, 2)),
    "TP 2 of layers, EP 4 of experts": (4, sizes(2, 4, 1)),
}
# Tokens of each replica; of more numbers than there are replicas the first count.
COUNTS = ((6, 6, 6, 6), (5, 1, 2, 3), (1, 9, 2, 1), (1, 1, 1, 1))


def make_whole(config: ModelConfig, bias: Tensor | None = None) -> tuple[torch.nn.Module, Whole]:
    """The layer on one rank, with this bias of its router if one is given, and its parameters by global name."""
    model = build_model(config, device=CPU, seed=3)
    generator = torch.Generator().manual_seed(4)
    layer = model.decoder.layers[0].mlp
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.uniform_(-0.3, 0.3, generator=generator)
        if bias is not None:
            layer.router.expert_bias.copy_(bias)
    return layer, whole_parameters(model)


def make_hidden(config: ModelConfig, replica: int, count: int) -> Tensor:
    """[T, 1, h]; other tokens for each replica."""
    return torch.randn(count, 1, config.hidden_size, generator=torch.Generator().manual_seed(50 + replica))


Models = dict[str, tuple[ModelConfig, Whole]]


@dataclass
class Computed:
    """Results of a rank's layer for all `COUNTS`.

    Attributes:
        replica: Replica of the rank.
        outputs: Outputs, [T, 1, h] each.
        reached: Number of tokens that reached its experts.
    """

    replica: int
    outputs: list[Tensor]
    reached: list[int]


def run_layers(parallel: ParallelConfig, models: Models) -> dict[str, Computed]:
    """Run the layers on one rank."""
    platform.initialize(parallel)
    replica = parallel_state.get_data_parallel_rank()
    return {name: run_layer(config, whole, replica) for name, (config, whole) in models.items()}


def run_layer(config: ModelConfig, whole: Whole, replica: int) -> Computed:
    model = build_model(config, device=CPU)
    fill(model, whole)
    layer = model.decoder.layers[0].mlp
    reached: list[int] = []
    layer.experts.register_forward_pre_hook(lambda _, inputs: reached.append(len(inputs[0])))
    with torch.inference_mode():
        outputs = [layer(make_hidden(config, replica, counts[replica]))[0] for counts in COUNTS]
    return Computed(replica, outputs, reached)


def assert_right(computed: Computed, layer: torch.nn.Module, config: ModelConfig) -> None:
    for counts, output in zip(COUNTS, computed.outputs, strict=True):
        hidden = make_hidden(config, computed.replica, counts[computed.replica])
        assert output.shape == hidden.shape
        assert routing_margin(layer, hidden[:, 0], config) > 1e-5
        expected = reference_moe(layer, hidden[:, 0], config).float()
        torch.testing.assert_close(output[:, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[torch.nn.Module, Whole]]:
    return {name: make_whole(config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_the_formulas(layout, models):
    """Each token is computed once: upstream computes it once for every rank that has it."""
    size, parallel = LAYOUTS[layout]
    replicas = size // parallel.tensor_model_parallel_size
    ranks = run_ranks(run_layers, size, parallel, {name: (CONFIGS[name], whole) for name, (_, whole) in models.items()})
    for name, config in CONFIGS.items():
        for rank in ranks:
            assert_right(rank[name], models[name][0], config)
        for step, counts in enumerate(COUNTS):
            chosen = config.moe_router_topk * sum(counts[:replicas]) * parallel.expert_tensor_size
            assert sum(rank[name].reached[step] for rank in ranks) == chosen, name


def test_experts_without_tokens(models):
    """All tokens of all ranks go to experts of one rank; the other one has none at all."""
    name = "one expert a token"
    config, (layer, whole) = CONFIGS[name], models[name]
    moved = layer.router.expert_bias.clone()
    moved[:4] += 10.0
    _, whole = make_whole(config, moved)
    first, second = run_ranks(run_layers, 2, sizes(1, 2, 1), {name: (config, whole)})
    assert first[name].reached == [sum(counts[:2]) for counts in COUNTS]
    assert second[name].reached == [0] * len(COUNTS)
    assert_right(second[name], make_whole(config, moved)[0], config)


DAMAGE = ("experts.experts.linear_fc1.weight", "shared_experts.linear_fc1.weight")


@pytest.mark.parametrize("layout", ["EP 2", "TP 2 x EP 2"])
def test_the_comparison_can_fail(layout, models):
    size, parallel = LAYOUTS[layout]
    name = "sigmoid, bias, shared experts"
    layer, whole = models[name]
    damaged: Models = {}
    for part in DAMAGE:
        key = f"decoder.layers.0.mlp.{part}"
        damaged[part] = CONFIGS[name], whole | {key: whole[key].flip(0)}
    for rank in run_ranks(run_layers, size, parallel, damaged):
        for part in DAMAGE:
            with pytest.raises(AssertionError, match="not close"):
                assert_right(rank[part], layer, CONFIGS[name])
