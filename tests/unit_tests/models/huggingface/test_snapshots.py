"""An imported NemotronH checkpoint with warm prompts: logits are those of a full forward of transformers."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.config import SourceConfig
from megatron_ext.models.load import load_model
from tests.priority import TestPriority
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.support.hybrid_caching import HybridDriver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

BLOCK = 16
SHAPES = [shape for shape in oracle.SHAPES if "M" in shape.pattern and shape.name != "MoE"]
CHUNKED = {"max_tokens": 48, "max_requests": 8}
WHOLE = {"max_tokens": 1024, "enable_chunked_prefill": False}
CASES = [
    *(pytest.param(shape.name, CHUNKED, id=f"{shape.name}-chunked") for shape in SHAPES),
    pytest.param("mha", WHOLE, id="mha-whole"),
]


def excess(driver: HybridDriver, request_id: int, theirs: torch.nn.Module) -> float:
    """Largest error of all generated tokens' logits in units of 1e-4 (plus 1e-4 of the value); at most 1 is equal."""
    record = driver.records[request_id]
    prompt, generated = list(record.prompt_tokens), list(record.generated_tokens)
    reference = oracle.their_logits(theirs, prompt + generated)[len(prompt) - 1 : -1]
    got = torch.stack([driver.seen[request_id].logits[len(prompt) + i][-1] for i in range(len(generated))])
    return oracle.largest_excess(got, reference)


def play(driver: HybridDriver) -> list[int]:
    """Serve one prompt twice, with another end, and with the next chat turn; return the skipped tokens of each."""
    prompt = oracle.prompt(100, seed=1)
    driver.sight(0, prompt, num_tokens_to_generate=13)
    answer = driver.records[0].generated_tokens
    driver.add(1, prompt)
    driver.add(2, [*prompt[:70], *oracle.prompt(9, seed=2)])
    driver.add(3, [*prompt, *answer, *oracle.prompt(5, seed=3)])
    driver.run()
    driver.sight(4, [*prompt[:70], *oracle.prompt(12, seed=4)])
    return driver.skipped(*range(5))


@pytest.fixture
def build(oracles):
    def build(name: str, **batching: object) -> tuple[HybridDriver, torch.nn.Module]:
        theirs, directory = oracles(name)
        loaded = load_model(SourceConfig(load_hf=str(directory)), {}, device=torch.device("cpu"))
        return HybridDriver(loaded.model, loaded.config, block_size=BLOCK, **batching), theirs

    return build


@pytest.mark.parametrize(("name", "batching"), CASES)
def test_warm_starts_equal_transformers(build, name, batching):
    """HY-3, HY-4, EX-1: an implementation that we did not write computes the whole prompt."""
    driver, theirs = build(name, **batching)
    assert play(driver) == [0, 96, 64, 112, 64]  # 64: an opportunistic checkpoint
    for request_id in range(5):
        assert excess(driver, request_id, theirs) <= 1


@pytest.mark.parametrize("which", ["conv", "ssm"])
def test_the_comparison_sees_a_lost_state(build, which):
    """Negative control: one layer of all snapshots is zero."""
    driver, theirs = build("mha")
    driver.sight(0, oracle.prompt(100, seed=1))
    getattr(driver.context.snapshots, which)[1] = 0.0
    assert driver.sight(1, oracle.prompt(100, seed=1)) == 96
    assert excess(driver, 0, theirs) <= 1
    assert excess(driver, 1, theirs) > 10
