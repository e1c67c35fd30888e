"""KV-7, MR-3: layers that two ranks share, in an engine each that does the same, against one rank that has them whole.

Pools are poisoned; compared are tokens, counts, logits of every sampled token, and each rank's states with its share of
the whole ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.mixers.gated_delta_net import GatedDeltaNetMixer
from megatron_ext.mixers.mamba1 import Mamba1Mixer
from megatron_ext.mixers.mamba2 import Mamba2Mixer
from megatron_ext.mixers.mixer import RecurrentMixer
from megatron_ext.models.build import build_model
from megatron_ext.ops.cpp import can_be_built
from megatron_ext.ops.linear import INT8, Packable, onednn
from tests.priority import TestPriority
from tests.unit_tests.support.driver import Driver, assert_logits_close, assert_states_close
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Lived, assert_same, lead
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import ACTIONS, BATCHING, CACHES, everything, with_vocabulary
from tests.unit_tests.support.spread import Whole, fill, whole_parameters

pytestmark = [pytest.mark.worlds, pytest.mark.priority(TestPriority.HIGH)]

CPU = torch.device("cpu")
TP_2 = ParallelConfig(tensor_model_parallel_size=2)
GATED = dataclasses.replace(
    CONFIGS["attention_only"],
    num_query_groups=1,
    attention_output_gate=True,
    qk_layernorm=True,
    normalization="RMSNorm",
)
MODELS = {
    "hybrid": CONFIGS["hybrid"],
    "gated_delta_net": CONFIGS["gated_delta_net"],
    "mamba1": CONFIGS["mamba1"],
    "attention_free": CONFIGS["attention_free"],
    "two ranks have the same keys": dataclasses.replace(CONFIGS["hybrid"], num_query_groups=1),
    "and gates of their own": GATED,
}
MODELS = {name: with_vocabulary(config) for name, config in MODELS.items()}
# The first third of that life: hits, a snapshot's restore, chunks, scores, an abort.
SCRIPT = dataclasses.replace(everything("kernel"), actions=ACTIONS[:13])


@dataclass
class Sighted:
    """Actions of an engine and the contents of its pools meanwhile.

    Attributes:
        logits: Logits by request and number of tokens computed by then; [V].
        states: Convolution and recurrent states of all layers, by the keys of `logits`.
        kv_heads: KV heads of its cache.
    """

    lived: Lived
    logits: dict[tuple[int, int], Tensor]
    states: dict[tuple[int, int], tuple[Tensor, Tensor]]
    kv_heads: int


def sight(config: ModelConfig, model: torch.nn.Module, **options: object) -> Sighted:
    driver = Driver(model, config, cache=CACHES["kernel"], **BATCHING, **options)
    lived = lead(driver.engine, SCRIPT)
    logits = {(who, at): seen[-1] for who, one in driver.seen.items() for at, seen in one.logits.items()}
    states = {(who, at): seen[-1] for who, one in driver.seen.items() for at, seen in one.states.items()}
    return Sighted(lived, logits, states, driver.context.plan.shape.kv_heads)


def sight_share(config: ModelConfig, whole: Whole) -> Sighted:
    """Observe one rank of two, each with an engine of its own and equal requests."""
    platform.initialize(TP_2)
    model = build_model(config, device=CPU)
    fill(model, whole)
    return sight(config, model)


def sight_packed_share(config: ModelConfig, whole: Whole) -> Sighted:
    """Observe one rank of two whose weights are packed, and come back to the bit in a state dict."""
    platform.initialize(TP_2)
    model = build_model(config, device=CPU)
    fill(model, whole)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    sighted = sight(config, model, operator_backend="onednn", packs_weights=True)
    assert all(layer.packed is not None for layer in model.modules() if isinstance(layer, Packable))
    state = model.state_dict()
    assert [name for name, one in before.items() if not torch.equal(one, state[name])] == []
    return sighted


def sight_quantized_share(config: ModelConfig, whole: Whole) -> Sighted:
    """Observe one rank of two that has quantized its part of the weights."""
    platform.initialize(TP_2)
    model = build_model(config, device=CPU)
    fill(model, whole)
    sighted = sight(config, model, cpu_weight_quantization="int8", packs_weights=True)
    assert {layer.packed_by for layer in model.modules() if isinstance(layer, Packable)} == {INT8}
    return sighted


def sections(mixer: RecurrentMixer) -> tuple[int, ...]:
    """Channels of what a mixer convolves, each shared by the ranks."""
    if isinstance(mixer, Mamba2Mixer):
        return mixer.d_inner_local, mixer.ngroups_local * mixer.d_state, mixer.ngroups_local * mixer.d_state
    if isinstance(mixer, GatedDeltaNetMixer):
        return mixer.qk_dim_local, mixer.qk_dim_local, mixer.v_dim_local
    assert isinstance(mixer, Mamba1Mixer)
    return (mixer.d_inner_local,)


def share_of_states(model: torch.nn.Module, whole: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Share that one of two ranks has of the states [layers, ...] of a sequence."""
    mixer = next(module for module in model.modules() if isinstance(module, RecurrentMixer))
    conv, recurrent = whole
    parts = [part.chunk(2, dim=1)[rank] for part in conv.split(sections(mixer), dim=1)]
    return torch.cat(parts, dim=1), recurrent.chunk(2, dim=1)[rank]


def assert_right_share(rank: int, own: Sighted, expected: Sighted, model: torch.nn.Module) -> None:
    assert_same(own.lived, expected.lived)
    assert own.logits.keys() == expected.logits.keys()
    for who, logits in own.logits.items():
        assert_logits_close(logits, expected.logits[who], f"logits of {who}")
    assert own.states.keys() == expected.states.keys()
    for who, states in own.states.items():
        for mine, whole in zip(states, share_of_states(model, expected.states[who], rank), strict=True):
            assert_states_close(mine, whole, f"states of {who}")


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_one(name):
    config = MODELS[name]
    model = build_slow_decay(config)
    expected = sight(config, model)
    assert expected.lived.statistics["hits"] >= 2
    ranks = run_ranks(sight_share, 2, config, whole_parameters(model), deadline=120.0)
    for rank, own in enumerate(ranks):
        assert_right_share(rank, own, expected, model)
        assert own.kv_heads == max(1, config.num_query_groups // 2)
    for who, logits in ranks[0].logits.items():
        assert torch.equal(logits, ranks[1].logits[who]), "gathered logits differ between the ranks"


@pytest.mark.skipif(onednn.problem() is not None, reason=f"{onednn.problem()}")
def test_two_ranks_with_packed_weights_equal_one():
    config = MODELS["hybrid"]
    model = build_slow_decay(config)
    expected = sight(config, model)
    for rank, own in enumerate(run_ranks(sight_packed_share, 2, config, whole_parameters(model), deadline=120.0)):
        assert_right_share(rank, own, expected, model)


@pytest.mark.skipif(not can_be_built(), reason="there is no C++ compiler")
def test_two_ranks_with_quantized_weights_agree():
    """Ranks agree to the bit, and nearly with exact weights: scales differ from those of whole weights."""
    config = MODELS["hybrid"]
    model = build_slow_decay(config)
    expected = sight(config, model).logits
    first, second = run_ranks(sight_quantized_share, 2, config, whole_parameters(model), deadline=120.0)
    assert first.logits.keys() == second.logits.keys()
    assert all(torch.equal(logits, second.logits[who]) for who, logits in first.logits.items())
    for request in {request for request, _ in expected}:
        key = min(key for key in expected if key[0] == request)  # after the prompt; tokens may differ later on
        error = (first.logits[key] - expected[key]).norm() / expected[key].norm()
        assert 0 < error < 0.1


def test_the_comparison_of_states_can_fail():
    """One rank's share differs from the other's."""
    config = MODELS["hybrid"]
    model = build_slow_decay(config)
    expected = sight(config, model)
    first = dataclasses.replace(
        expected,
        states={who: share_of_states(model, states, 0) for who, states in expected.states.items()},
    )
    assert_right_share(0, first, expected, model)
    with pytest.raises(AssertionError, match="states of"):
        assert_right_share(1, first, expected, model)
