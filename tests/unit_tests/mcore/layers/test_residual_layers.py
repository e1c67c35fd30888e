"""Layers that do only their arithmetic at inference train, are stored and answer as megatron-core's do."""

from __future__ import annotations

import dataclasses
import warnings
from unittest import mock

import pytest
import torch
from megatron.core.models.mamba import MambaModel
from megatron.core.tensor_parallel import layers as upstream_linear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_ext.config import ModelConfig
from megatron_ext.mcore.layers import norms, stack
from megatron_ext.mcore.layers import residual_layers as own_layers
from tests.unit_tests.support.models import ATTENTION_ONLY, GATED_DELTA_NET, HYBRID, MAMBA1, build_slow_decay
from tests.unit_tests.support.upstream_layers import UPSTREAM, upstream_layers

MOE = dataclasses.replace(
    HYBRID,
    hybrid_override_pattern="ME*E",
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=32,
    moe_latent_size=24,
    squared_relu=True,
    disable_bias_linear=True,
)
CONFIGS = {
    "Mamba-2, biases, GELU": HYBRID,
    "gated delta net, SwiGLU": dataclasses.replace(GATED_DELTA_NET, swiglu=True, disable_bias_linear=True),
    "Mamba-1, squared ReLU": dataclasses.replace(MAMBA1, squared_relu=True),
    "attention with gate, LayerNorm, SwiGLU, biases": dataclasses.replace(
        ATTENTION_ONLY, attention_output_gate=True, qk_layernorm=True, normalization="LayerNorm", swiglu=True
    ),
    "MoE": MOE,
}
TOKENS = torch.randint(97, (2, 70), generator=torch.Generator().manual_seed(3))


def both(config: ModelConfig) -> tuple[MambaModel, MambaModel]:
    """Ours and upstream's, with equal parameters."""
    ours = build_slow_decay(config)
    with upstream_layers():
        theirs = build_slow_decay(config)
    return ours, theirs


def forward(model: MambaModel, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return model(tokens, positions, None)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys(), scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[MambaModel, MambaModel]:
    return both(request.param)


def test_the_other_model_is_of_upstream(pair):
    """The control: no class of ours is in it, and all that stand in the specs are in ours or in its siblings."""
    ours, theirs = ({type(module) for module in model.modules()} for model in pair)
    own = {*UPSTREAM, norms.PlainRMSNorm}
    assert ours & own
    assert not theirs & own


def test_checkpoints_are_the_same(pair):
    """SC-2: names and values of parameters, and keys and shapes of distributed checkpoints."""
    ours, theirs = pair
    own, other = ours.state_dict(), theirs.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own if isinstance(own[name], torch.Tensor))
    described = [
        {name: (type(one), one.key) for name, one in model.sharded_state_dict().items()} for model in (ours, theirs)
    ]
    assert described[0] == described[1]


def test_gradients_in_training_are_equal(pair):
    """SC-2: bit for bit, of every parameter; and so is what comes out where inference mode is off."""
    gradients, outputs = [], []
    for model in pair:
        model.train()
        logits = forward(model)
        logits.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        model.zero_grad(set_to_none=True)
        model.eval()
        with torch.no_grad():
            outputs.append((logits.detach(), forward(model)))
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients[0].values())
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert all(torch.equal(own, other) for own, other in zip(*outputs, strict=True))


@torch.inference_mode()
def test_answers_at_inference_are_equal(pair):
    """SC-2: within the tolerance of rounding; the input is not written over."""
    ours, theirs = pair
    logits = forward(ours)
    torch.testing.assert_close(logits, forward(theirs), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(logits, forward(ours), atol=0, rtol=0)
    hidden = torch.randn(9, 2, ours.config.hidden_size)
    before = hidden.clone()
    for layer in ours.decoder.layers:
        layer(hidden)
        assert torch.equal(hidden, before)


@torch.inference_mode()
def test_nothing_of_upstream_runs_at_inference():
    """SC-2: inference runs none of the wrapped forwards, no autograd function around products, and warns of nothing."""
    ours, theirs = both(dataclasses.replace(HYBRID, untie_embeddings_and_output_weights=False))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("upstream's forward was called")

    with (
        mock.patch.object(TransformerLayer, "forward", refuse),
        mock.patch.object(MLP, "forward", refuse),
        mock.patch.object(own_layers.MambaLayer, "forward", refuse),
        mock.patch.object(stack.Stack, "forward", refuse),
        mock.patch.object(upstream_linear.RowParallelLinear, "forward", refuse),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        forward(ours)
        with pytest.raises(AssertionError, match="upstream"):
            forward(theirs)


@torch.inference_mode()
@pytest.mark.parametrize("setting", [{"mlp_chunks_for_prefill": 2}, {"fp8": "e4m3"}, {"cuda_graph_impl": "local"}])
def test_layers_with_extra_settings_are_upstreams(setting):
    layer = build_slow_decay(HYBRID).decoder.layers[0]
    assert own_layers.is_plain_inference(layer)
    with mock.patch.multiple(layer.config, **setting):
        assert not own_layers.is_plain_inference(layer)
    layer.train()
    assert not own_layers.is_plain_inference(layer)


@torch.inference_mode()
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rms_norm_by_length(scale):
    """RMS norm agrees with torch's in fp64, including rows of zeros and a single channel."""
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(1)) * scale
    x[3] = 0.0
    norm = norms.PlainRMSNorm(48, eps=1e-5)
    norm.weight.uniform_(0.5, 1.5)
    expected = torch.nn.functional.rms_norm(x.double(), (48,), norm.weight.double(), 1e-5)
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-6 * min(scale, 1.0), rtol=2e-6)


def test_a_layer_with_hooks_is_called():
    """A step adds layer outputs without calling the layers, unless they have hooks."""
    model = build_slow_decay(HYBRID).eval()
    with torch.inference_mode():
        expected, seen = forward(model), []
        for layer in model.decoder.layers:
            layer.register_forward_hook(lambda layer, *_: seen.append(layer.layer_number))
        found = forward(model)
    assert seen == [layer.layer_number for layer in model.decoder.layers]
    assert torch.equal(found, expected)


def test_layers_beside_parallel_ones_train_as_upstreams():
    """Our stack computes patterns with parallel layers in training, too; no layer of it is a branch then."""
    model = build_slow_decay(dataclasses.replace(HYBRID, hybrid_override_pattern="P-*M")).train()
    for kind in (own_layers.FeedForwardLayer, own_layers.AttentionLayer, own_layers.RecurrentLayer):
        assert any(isinstance(layer, kind) for layer in model.decoder.layers)
    with mock.patch.object(own_layers, "ResidualBranch", side_effect=AssertionError("a branch")):
        forward(model).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_hooks_before_and_after_a_forward_are_found():
    module, before, after = nn.Linear(2, 2), lambda *_: None, lambda *_: None
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    assert own_layers.forward_hooks(module) == [before, after]
