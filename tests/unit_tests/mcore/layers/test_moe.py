"""MoE layers against a reference of our own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.models.build import build_model
from tests.unit_tests.support.moe import reference_moe, routing_margin

CPU = torch.device("cpu")
# Closer scores could be ordered differently by rounding, which is no error but would look like one.
LEAST_MARGIN = 1e-5

SOFTMAX = ModelConfig(
    hybrid_override_pattern="E",
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=2,
    num_experts=6,
    moe_ffn_hidden_size=16,
    vocab_size=31,
)
SIGMOID = dataclasses.replace(
    SOFTMAX,
    squared_relu=True,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    moe_shared_expert_intermediate_size=20,
)
LAYERS = {
    "softmax": SOFTMAX,
    "softmax, SwiGLU, shared experts, width of the MLP": dataclasses.replace(
        SOFTMAX, swiglu=True, moe_ffn_hidden_size=None, moe_shared_expert_intermediate_size=12
    ),
    "sigmoid, bias, scaling, shared experts": SIGMOID,
    "all experts": dataclasses.replace(SIGMOID, moe_router_topk=6),
    "one expert a token": dataclasses.replace(SIGMOID, moe_router_topk=1),
    "one expert": dataclasses.replace(SIGMOID, moe_router_topk=1, num_experts=1),
    "groups": dataclasses.replace(
        SIGMOID, num_experts=12, moe_router_topk=4, moe_router_num_groups=4, moe_router_group_topk=2
    ),
    "groups ranked by three": dataclasses.replace(
        SIGMOID, num_experts=12, moe_router_topk=3, moe_router_num_groups=3, moe_router_group_topk=1
    ),
    "latent": dataclasses.replace(SIGMOID, moe_latent_size=10),
}


def make_layer(config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """An MoE layer whose routers and biases have something to say."""
    layer = build_model(config, dtype=dtype, device=CPU, seed=3).decoder.layers[0].mlp
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            std = parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.uniform_(-0.3, 0.3, generator=generator)
    return layer


def make_hidden(config: ModelConfig, length: int = 24, batch: int = 3) -> Tensor:
    """[s, b, h]."""
    return torch.randn(length, batch, config.hidden_size, generator=torch.Generator().manual_seed(5))


def run_layer(layer: nn.Module, hidden: Tensor) -> Tensor:
    """[s, b, h] -> [s * b, h]."""
    output, bias = layer(hidden)
    assert bias is None
    return output.flatten(0, 1)


LAYER_CONTROLS = {
    "no bias": lambda layer: layer.router.expert_bias.zero_(),
    "scaling": lambda layer: setattr(layer.router.config, "moe_router_topk_scaling_factor", 2.4),
    "top-k": lambda layer: setattr(layer.router, "topk", 2),
    "open groups": lambda layer: setattr(layer.router.config, "moe_router_group_topk", 4),
    "no shared experts": lambda layer: setattr(layer, "use_shared_expert", False),
    "score function": lambda layer: setattr(layer.router, "score_function", "softmax"),
}


class TestLayer:
    @pytest.mark.parametrize("name", LAYERS)
    def test_equals_reference(self, name):
        config = LAYERS[name]
        layer, hidden = make_layer(config), make_hidden(config)
        assert routing_margin(layer, hidden.flatten(0, 1), config) > LEAST_MARGIN
        expected = reference_moe(layer, hidden.flatten(0, 1), config).float()
        assert expected.std() > 0.1
        with torch.no_grad():
            torch.testing.assert_close(run_layer(layer, hidden), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            run_layer(layer, hidden), expected, atol=1e-5, rtol=1e-5
        )  # where gradients are wanted

    @pytest.mark.parametrize("name", ["softmax", "groups", "latent"])
    def test_gradients_equal_reference(self, name):
        config = LAYERS[name]
        layer, hidden = make_layer(config), make_hidden(config, 8, 2).requires_grad_()
        direction = torch.randn(16, config.hidden_size, generator=torch.Generator().manual_seed(6))
        tensors = [hidden, *layer.parameters()]
        got = torch.autograd.grad((run_layer(layer, hidden) * direction).sum(), tensors)
        reference = (reference_moe(layer, hidden.flatten(0, 1), config) * direction).sum()
        expected = torch.autograd.grad(reference, tensors, allow_unused=True, materialize_grads=True)
        assert sum(gradient.abs().max() > 1e-2 for gradient in expected) > len(tensors) / 2
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("control", LAYER_CONTROLS)
    @torch.no_grad()
    def test_comparison_finds_planted_errors(self, control):
        """Negative controls."""
        config = LAYERS["groups"]
        layer, hidden = make_layer(config), make_hidden(config)
        expected = reference_moe(layer, hidden.flatten(0, 1), config).float()
        LAYER_CONTROLS[control](layer)
        assert (run_layer(layer, hidden) - expected).abs().max() > 1e-2

    @pytest.mark.parametrize("name", LAYERS)
    @torch.no_grad()
    def test_a_token_depends_on_no_other(self, name):
        """A token depends neither on the number of others nor on NaN in their places: padding is harmless."""
        config = LAYERS[name]
        layer, hidden = make_layer(config), make_hidden(config, 40, 1)
        together = run_layer(layer, hidden)
        for index in (0, 17, 39):
            alone = run_layer(layer, hidden[index : index + 1])[0]
            torch.testing.assert_close(alone, together[index], atol=1e-5, rtol=1e-5)
        spoiled = hidden.clone()
        spoiled[30:] = torch.nan
        torch.testing.assert_close(run_layer(layer, spoiled)[:30], together[:30], atol=1e-5, rtol=1e-5)

    @torch.no_grad()
    def test_routing_is_computed_in_fp32(self):
        layer = make_layer(SIGMOID, dtype=torch.bfloat16)
        hidden = make_hidden(SIGMOID).bfloat16()
        logits = layer.router.gating(hidden)
        assert (layer.router.weight.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
        expected = hidden.double() @ layer.router.weight.double().T
        torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)
        assert layer.router.expert_bias.dtype is torch.float32
        output = run_layer(layer, hidden)
        assert output.dtype is torch.bfloat16
        torch.testing.assert_close(
            output.double(), reference_moe(layer, hidden.flatten(0, 1), SIGMOID), atol=0.1, rtol=0.05
        )
