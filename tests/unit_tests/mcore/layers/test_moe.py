"""MoE layers: the layer against a reference of our own, the engine against a plain recompute, training, checkpoints."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.mamba import MambaModel
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.models.build import build_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.scheduling.request_events import EventType
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.moe import model_margin, reference_moe, routing_margin
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.saved_models import load_dist_checkpoint

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


# The engine. Two MoE layers, one of them first; groups, bias, scaling and shared experts.
MOE_HYBRID = dataclasses.replace(
    HYBRID,
    hybrid_override_pattern="EM-*ME",
    squared_relu=True,
    num_experts=12,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=20,
    moe_router_topk=4,
    moe_router_score_function="sigmoid",
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.0,
    moe_router_enable_expert_bias=True,
)
LENGTHS = (1, 3, 64, 65, 129)
CHUNKED = {"max_tokens": 80}
WHOLE = {"max_tokens": 700, "enable_chunked_prefill": False}


def build_moe() -> MambaModel:
    """Slow decay, and biases that decide."""
    model = build_slow_decay(MOE_HYBRID, seed=5)
    generator = torch.Generator().manual_seed(8)
    for layer in model.decoder.layers:
        if hasattr(layer, "mlp") and hasattr(layer.mlp, "router"):
            layer.mlp.router.expert_bias.uniform_(-0.2, 0.2, generator=generator)
    return model


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(build_moe())


@pytest.fixture
def driver(oracle: Oracle, request: pytest.FixtureRequest) -> Driver:
    return Driver(oracle.model, MOE_HYBRID, **getattr(request, "param", CHUNKED))


def check_all(driver: Driver, oracle: Oracle) -> None:
    assert len(driver.records) == len(LENGTHS)
    for request_id in driver.records:
        assert_equals_oracle(driver, request_id, oracle)


def serve_mixed(driver: Driver, **params: object) -> None:
    """Requests of all lengths, half of them while others run."""
    for request_id, length in enumerate(LENGTHS):
        driver.add(request_id, make_prompt(length), **params)
        if request_id % 2:
            driver.step()
    driver.run()


def test_routers_do_not_waver(driver, oracle):
    """Comparisons in the tests below do not depend on the rounding of a router's score."""
    serve_mixed(driver, num_tokens_to_generate=20)
    for record in driver.records.values():
        tokens = [*record.prompt_tokens, *record.generated_tokens]
        assert model_margin(oracle.model, tokens, MOE_HYBRID) > LEAST_MARGIN, record.prompt_token_count


@pytest.mark.parametrize("driver", [CHUNKED, WHOLE], indirect=True, ids=["chunked", "whole"])
def test_mixed_batch_equals_recompute(driver, oracle):
    serve_mixed(driver)
    assert any(len({end - start for _, start, end in step}) > 1 for step in driver.steps), "decode beside prefill"
    check_all(driver, oracle)


@pytest.mark.parametrize("driver", [{"token_rounder": 64, **CHUNKED}], indirect=True)
def test_padding_changes_nothing(driver, oracle):
    stage, paddings = driver.context.stage, []

    def stage_watched(chunks: object) -> None:
        stage(chunks)
        paddings.append(driver.context.padded_active_token_count - driver.context.active_token_count)

    driver.context.stage = stage_watched
    serve_mixed(driver)
    assert max(paddings) > 50
    check_all(driver, oracle)


@pytest.mark.long
@pytest.mark.parametrize("driver", [{"block_count": 14, **CHUNKED}], indirect=True)
def test_under_pressure(driver, oracle):
    """Evicted requests compute everything again."""
    serve_mixed(driver, num_tokens_to_generate=20)
    assert driver.count(EventType.EVICT) + driver.count(EventType.PAUSE) > 0
    check_all(driver, oracle)


CONTROLS = {
    "expert bias dropped": lambda model: model.decoder.layers[0].mlp.router.expert_bias.zero_(),
    "wrong scaling": lambda model: setattr(
        model.decoder.layers[5].mlp.router.config, "moe_router_topk_scaling_factor", 1.9
    ),
    "an expert lost": lambda model: model.decoder.layers[5].mlp.experts.local_experts[3].linear_fc2.weight.zero_(),
}


@pytest.mark.parametrize("control", CONTROLS)
@torch.no_grad()
def test_engine_comparison_finds_planted_errors(control, oracle):
    """Negative controls."""
    model = build_moe()
    CONTROLS[control](model)
    driver = Driver(model, MOE_HYBRID, **CHUNKED)
    driver.add(0, make_prompt(129))
    driver.run()
    with pytest.raises(AssertionError):
        assert_equals_oracle(driver, 0, oracle)


class TestTraining:
    def test_loss_falls_and_every_parameter_learns(self):
        model = build_moe().train()
        tokens = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(9))
        positions = torch.arange(32).expand(2, -1)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(6):
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                assert parameter.grad.isfinite().all(), name
            assert all(layer.mlp.router.weight.grad.abs().max() > 0 for layer in _moe_layers(model))
            optimizer.step()
        assert losses[-1] < losses[0] - 0.5, losses

    def test_tokens_of_each_expert_are_counted_in_training_only(self):
        model = build_moe()
        tokens, positions = torch.arange(20)[None], torch.arange(20)[None]
        model(tokens, positions, None)
        assert all(layer.mlp.router.local_tokens_per_expert.sum() == 0 for layer in _moe_layers(model))
        model.train()(tokens, positions, None)
        assert all(layer.mlp.router.local_tokens_per_expert.sum() == 20 * 4 for layer in _moe_layers(model))
        with torch.no_grad():
            model(tokens, positions, None)
        assert all(layer.mlp.router.local_tokens_per_expert.sum() == 20 * 4 for layer in _moe_layers(model))


def _moe_layers(model: MambaModel) -> list[nn.Module]:
    return [layer for layer in model.decoder.layers if hasattr(getattr(layer, "mlp", None), "router")]


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_distributed_checkpoint_holds_experts_and_bias(tmp_path):
    """megatron-core's own form: experts are one global tensor with a dimension more, the bias is there."""
    config = dataclasses.replace(MOE_HYBRID, moe_latent_size=16)
    source, target = build_slow_decay(config, seed=1), build_slow_decay(config, seed=2)
    _moe_layers(source)[0].mlp.router.expert_bias.uniform_(-0.2, 0.2)
    sharded = source.sharded_state_dict()
    experts = next(value for name, value in sharded.items() if "local_experts.3.linear_fc1.weight" in name)
    assert experts.global_shape == (12, 24, 16)
    dist_checkpointing.save(sharded, tmp_path)
    target.load_state_dict(dist_checkpointing.load(target.sharded_state_dict(), tmp_path))
    tokens = make_prompt(65)
    assert not torch.equal(Oracle(build_slow_decay(config, seed=2)).logits(tokens), Oracle(source).logits(tokens))
    assert torch.equal(Oracle(target).logits(tokens), Oracle(source).logits(tokens))


def test_configurations_saved_before_there_was_moe_still_load(tmp_path):
    config = dataclasses.replace(HYBRID, hybrid_override_pattern="M-")
    model = build_slow_decay(config)
    save_dist_checkpoint(tmp_path / "saved", model, config)
    path = tmp_path / "saved" / "config.json"
    header = json.loads(path.read_text())
    later = [name for name in header["model"] if name.startswith("moe_") or name == "num_experts"]
    assert {"num_experts", "moe_router_topk"} < set(later)
    for name in later:
        del header["model"][name]
    path.write_text(json.dumps(header))
    loaded, loaded_config = load_dist_checkpoint(tmp_path / "saved")
    assert loaded_config == config
    assert torch.equal(Oracle(loaded).logits(make_prompt(20)), Oracle(model).logits(make_prompt(20)))
