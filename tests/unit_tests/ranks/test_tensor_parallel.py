"""KV-7, MR-3: layers that two ranks share, in an engine each that does the same, against one rank that has them whole.

Pools are poisoned; compared are tokens, counts, logits of every sampled token, and each rank's states with its share of
the whole ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
from tests.priority import TestPriority
from tests.unit_tests.support.driver import Driver, assert_logits_close, assert_states_close
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import (
    BATCHING,
    CACHES,
    Played,
    assert_meets_everything,
    assert_same,
    play,
    with_vocabulary,
)
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
    **CONFIGS,
    "two ranks have the same keys": dataclasses.replace(CONFIGS["hybrid"], num_query_groups=1),
    "and gates of their own": GATED,
}
MODELS = {name: with_vocabulary(config) for name, config in MODELS.items()}


@dataclass
class Sighted:
    """What an engine did, and what it had in its pools meanwhile.

    Attributes:
        logits: By request and number of tokens computed then; [V].
        states: The same; convolution and recurrent states of all layers.
        kv_heads: Of its KV cache.
    """

    played: Played
    logits: dict[tuple[int, int], Tensor]
    states: dict[tuple[int, int], tuple[Tensor, Tensor]]
    kv_heads: int


def sight(config: ModelConfig, model: torch.nn.Module, cache: str) -> Sighted:
    driver = Driver(model, config, cache=CACHES[cache], **dataclasses.asdict(BATCHING))
    played = play(driver.engine)
    logits = {(who, at): seen[-1] for who, one in driver.seen.items() for at, seen in one.logits.items()}
    states = {(who, at): seen[-1] for who, one in driver.seen.items() for at, seen in one.states.items()}
    return Sighted(played, logits, states, driver.context.plan.shape.kv_heads)


def sight_share(config: ModelConfig, whole: Whole, caches: tuple[str, ...]) -> dict[str, Sighted]:
    """On one rank of two."""
    platform.initialize(TP_2)
    model = build_model(config, device=CPU)
    fill(model, whole)
    return {cache: sight(config, model, cache) for cache in caches}


def sections(mixer: RecurrentMixer) -> tuple[int, ...]:
    """Channels of what a mixer convolves, each shared by the ranks."""
    if isinstance(mixer, Mamba2Mixer):
        return mixer.d_inner_local, mixer.ngroups_local * mixer.d_state, mixer.ngroups_local * mixer.d_state
    if isinstance(mixer, GatedDeltaNetMixer):
        return mixer.qk_dim_local, mixer.qk_dim_local, mixer.v_dim_local
    assert isinstance(mixer, Mamba1Mixer)
    return (mixer.d_inner_local,)


def share_of_states(model: torch.nn.Module, whole: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """What one of two ranks has of the states [layers, ...] of a sequence."""
    mixer = next(module for module in model.modules() if isinstance(module, RecurrentMixer))
    conv, recurrent = whole
    parts = [part.chunk(2, dim=1)[rank] for part in conv.split(sections(mixer), dim=1)]
    return torch.cat(parts, dim=1), recurrent.chunk(2, dim=1)[rank]


def assert_right_share(rank: int, own: Sighted, expected: Sighted, model: torch.nn.Module) -> None:
    assert_same(own.played, expected.played)
    assert own.logits.keys() == expected.logits.keys()
    for who, logits in own.logits.items():
        assert_logits_close(logits, expected.logits[who], f"logits of {who}")
    assert own.states.keys() == expected.states.keys()
    for who, states in own.states.items():
        for mine, whole in zip(states, share_of_states(model, expected.states[who], rank), strict=True):
            assert_states_close(mine, whole, f"states of {who}")


@pytest.fixture(scope="module")
def references() -> Mapping[str, tuple[torch.nn.Module, dict[str, Sighted]]]:
    """Each model on one rank, and what it did."""
    found = {}
    for name, config in MODELS.items():
        model = build_slow_decay(config)
        found[name] = model, {cache: sight(config, model, cache) for cache in ("kernel",)}
    return found


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_do_what_one_does(name, references):
    config, (model, expected) = MODELS[name], references[name]
    first, second = run_ranks(sight_share, 2, config, whole_parameters(model), ("kernel",))
    for cache, reference in expected.items():
        recurrent = "M" in config.hybrid_override_pattern
        assert_meets_everything(reference.played, caches=cache != "off", recurrent=recurrent, policy=cache)
        for rank, own in enumerate((first[cache], second[cache])):
            assert_right_share(rank, own, reference, model)
            assert own.kv_heads == max(1, config.num_query_groups // 2)
        for who, logits in first[cache].logits.items():
            assert torch.equal(logits, second[cache].logits[who]), "gathered logits differ between the ranks"


def sight_damaged(config: ModelConfig, whole: Whole, what: str) -> Sighted:
    """The same, but rank 1 loses something of its own in the pools at the beginning of each step."""
    platform.initialize(TP_2)
    model = build_model(config, device=CPU)
    fill(model, whole)
    driver = Driver(model, config, cache=CACHES["kernel"], **dataclasses.asdict(BATCHING))
    if torch.distributed.get_rank() == 1:
        damage_after_staging(driver, what)
    played = play(driver.engine)
    logits = {(who, at): seen[-1] for who, one in driver.seen.items() for at, seen in one.logits.items()}
    return Sighted(played, logits, {}, 0)


def damage_after_staging(driver: Driver, what: str) -> None:
    context, stage = driver.context, driver.context.stage

    def stage_and_damage(*arguments: object) -> None:
        stage(*arguments)
        pools = {
            "keys and values": lambda: context.memory_buffer[:, :, :4],
            "states": lambda: context.live_states.ssm,
            "snapshots": lambda: context.snapshots.ssm,
        }
        pools[what]().nan_to_num_(0.0).mul_(0.5)

    context.stage = stage_and_damage


@pytest.mark.parametrize("what", ["keys and values", "states", "snapshots"])
def test_damage_on_one_rank_is_seen(what, references):
    """Negative control: half of one rank's pools, whose values its layers only see in part."""
    model, expected = references["hybrid"]
    first, _ = run_ranks(sight_damaged, 2, MODELS["hybrid"], whole_parameters(model), what)
    common = first.logits.keys() & expected["kernel"].logits.keys()
    with pytest.raises(AssertionError):
        assert_same(first.played, expected["kernel"].played)
    assert any(not torch.allclose(first.logits[who], expected["kernel"].logits[who], atol=1e-3) for who in common)
