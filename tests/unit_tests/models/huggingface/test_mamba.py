"""Imported Mamba, FalconMamba and Jamba checkpoints compute what transformers computes, cache off and on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from megatron_ext.config import SourceConfig
from megatron_ext.models.load import LoadedModel, load_model
from tests.on_request import long_except
from tests.priority import TestPriority
from tests.unit_tests.models.huggingface import mamba_oracle
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.support.hybrid_caching import HybridDriver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

LENGTHS = (1, 3, 65, 300)
BLOCK = 16
NAMES = [shape.name for shape in mamba_oracle.SHAPES]
JAMBA = [shape.name for shape in mamba_oracle.SHAPES if "num_experts" in shape.fields]
LEAST_MARGIN = 1e-5


def load_hf(directory: Path) -> LoadedModel:
    return load_model(SourceConfig(load_hf=str(directory)), {}, device=torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal(name: str, mambas) -> None:
    """M1-1: an oracle that we did not write: full forwards and greedy continuations, fp32."""
    theirs, directory = mambas(name)
    ours = load_hf(directory).model
    for length in LENGTHS:
        tokens = oracle.prompt(length, seed=length)
        reference = oracle.their_logits(theirs, tokens)
        assert reference.std() > 0.3, "flat logits would make this test blind"
        assert oracle.largest_excess(oracle.our_logits(ours, tokens), reference) <= 1, length
    tokens = oracle.prompt(20, seed=20)
    generated = oracle.greedy(lambda t: oracle.their_logits(theirs, t), tokens, 16)
    assert len(set(generated)) > 4, "a loop would make this test blind"
    assert oracle.greedy(lambda t: oracle.our_logits(ours, t), tokens, 16) == generated


@pytest.mark.parametrize("name", JAMBA)
def test_routers_do_not_waver(name: str, mambas) -> None:
    """Comparisons do not depend on the rounding of a router's score."""
    theirs, _ = mambas(name)
    for length in LENGTHS:
        assert mamba_oracle.routing_margin(theirs, oracle.prompt(length, seed=length)) > LEAST_MARGIN, length


def excess(driver: HybridDriver, request_id: int, theirs: PreTrainedModel) -> float:
    """Largest error of the logits of all generated tokens in units of the tolerance; at most 1 is equal."""
    record = driver.records[request_id]
    prompt, generated = list(record.prompt_tokens), list(record.generated_tokens)
    reference = oracle.their_logits(theirs, prompt + generated)[len(prompt) - 1 : -1]
    got = torch.stack([driver.seen[request_id].logits[len(prompt) + i][-1] for i in range(len(generated))])
    return oracle.largest_excess(got, reference)


def play(driver: HybridDriver) -> list[int]:
    """Serve one prompt twice, with another end, and with the next chat turn; return the skipped tokens of each."""
    prompt = oracle.prompt(100, seed=1)
    driver.sight(0, prompt, num_tokens_to_generate=13)
    driver.add(1, prompt)
    driver.add(2, [*prompt[:70], *oracle.prompt(9, seed=2)])
    driver.add(3, [*prompt, *driver.records[0].generated_tokens, *oracle.prompt(5, seed=3)])
    driver.run()
    driver.sight(4, [*prompt[:70], *oracle.prompt(12, seed=4)])
    return driver.skipped(*range(5))


@pytest.mark.parametrize("mode", long_except(["kernel"], ["kernel", "align"]))
@pytest.mark.parametrize("name", NAMES)
def test_warm_starts_equal_transformers(name: str, mode: str, mambas) -> None:
    """M1-1, HY-3, HY-4, LA-2: logits of the engine with the cache on are those of full forwards of transformers."""
    theirs, directory = mambas(name)
    loaded = load_hf(directory)
    driver = HybridDriver(loaded.model, loaded.config, block_size=BLOCK, max_tokens=48, max_requests=8, mode=mode)
    leaves_more = mode == "align"  # at 48 tokens, where the first step ends
    assert play(driver) == [0, 96, 48 if leaves_more else 64, 112, 64]  # 64: an opportunistic checkpoint
    for request_id in range(5):
        assert excess(driver, request_id, theirs) <= 1


def _zero(name: str) -> Callable[[nn.Module], object]:
    return lambda model: model.get_parameter(name).zero_()


def _swap_halves(model: nn.Module, name: str) -> None:
    weight = model.get_parameter(name)
    weight.copy_(weight.roll(weight.shape[0] // 2, dims=0))


FIRST = "decoder.layers.0.mixer."
CONTROLS = {
    "decay": ("mamba, tied", _zero(FIRST + "A_log")),
    "step bias": ("mamba, tied", lambda m: m.get_parameter(FIRST + "dt_proj.bias")[0].add_(0.3)),
    "step weight": ("mamba, tied", _zero(FIRST + "dt_proj.weight")),
    "D": ("mamba, tied", _zero(FIRST + "D")),
    "convolution reversed": ("mamba, tied", lambda m: m.get_parameter(FIRST + "conv1d.weight").copy_(
        m.get_parameter(FIRST + "conv1d.weight").flip(-1))),
    "gate and input swapped": ("mamba, tied", lambda m: _swap_halves(m, FIRST + "in_proj.weight")),
    "norm of dt left out": ("falcon", lambda m: setattr(m.decoder.layers[0].mixer, "dt_layernorm", nn.Identity())),
    "norm of B": ("jamba", lambda m: m.get_parameter(FIRST + "b_layernorm.weight").fill_(1)),
    "norm of C": ("jamba", lambda m: m.get_parameter(FIRST + "c_layernorm.weight").fill_(1)),
    "two experts swapped": ("jamba, experts", lambda m: _swap_halves(m, "decoder.layers.1.mlp.router.weight")),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("control", CONTROLS)
@torch.no_grad()
def test_comparison_sees_one_wrong_tensor(control: str, mambas) -> None:
    """Negative controls: each error is at least fifty times the tolerance."""
    name, spoil = CONTROLS[control]
    theirs, directory = mambas(name)
    ours, tokens = load_hf(directory).model, oracle.prompt(129, seed=3)
    reference = oracle.their_logits(theirs, tokens)
    assert oracle.largest_excess(oracle.our_logits(ours, tokens), reference) <= 1
    spoil(ours)
    assert oracle.largest_excess(oracle.our_logits(ours, tokens), reference) > 50


@pytest.mark.parametrize("which", ["conv", "ssm"])
@pytest.mark.parametrize("name", ["mamba, tied", "jamba"])
def test_the_comparison_sees_a_lost_state(name: str, which: str, mambas) -> None:
    """Negative control: one layer of all snapshots is zero."""
    theirs, directory = mambas(name)
    loaded = load_hf(directory)
    driver = HybridDriver(loaded.model, loaded.config, block_size=BLOCK, max_requests=8)
    driver.sight(0, oracle.prompt(100, seed=1))
    getattr(driver.context.snapshots, which)[1] = 0.0
    assert driver.sight(1, oracle.prompt(100, seed=1)) == 96
    assert excess(driver, 0, theirs) <= 1
    assert excess(driver, 1, theirs) > 10
