"""HY-14: states of fewer bits. Log-probs with the cache on are close to those with it off; in fp32 they are equal."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.memory.step_states import StepStates
from tests.on_request import long_except
from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.hybrid_caching import build_driver

P95, MOST = math.log(1.05), math.log(1.2)  # of the differences between log-probs
BF16 = {"conv_states_dtype": "bf16", "ssm_states_dtype": "bf16"}
SYSTEM = make_prompt(3 * BLOCK + 5)
COUNT = 6


def play(driver: Driver) -> Driver:
    """Prompts that share a prefix, and each again: most resume."""
    for request_id in range(2 * COUNT):
        seed = request_id % COUNT
        driver.add(request_id, [*SYSTEM, *make_prompt(10 + 3 * seed, seed=seed)], num_tokens_to_generate=8)
        if request_id % COUNT in (0, 1):
            driver.run()
    driver.run()
    return driver


def differences(on: Driver, off: Driver, first: int = 0) -> torch.Tensor:
    """Differences of log-probs of generated tokens, up to the first token that differs."""
    found = []
    for request_id in range(first, 2 * COUNT):
        one, other = on.records[request_id], off.records[request_id]
        for i, (token, expected) in enumerate(zip(one.generated_tokens, other.generated_tokens, strict=True)):
            length = one.prompt_token_count + i
            logits = [driver.seen[request_id].logits[length][0].log_softmax(-1) for driver in (on, off)]
            found.append((logits[0][expected] - logits[1][expected]).abs())
            if token != expected:
                break
    return torch.stack(found)


@pytest.mark.parametrize("budget", long_except([60], [60, 2000]))
def test_bf16_states(get_driver, get_oracle, budget):
    """HY-14: p95 of the differences at most ln 1.05, the largest at most ln 1.2, with tokens skipped."""
    batching = BF16 | {"max_tokens": budget, "max_requests": 30}
    on, off = play(build_driver(get_oracle, **batching)), play(get_driver("hybrid", **batching))
    for pool in (on.context.allocated.snapshots, on.context.allocated.live_states):
        assert (pool.conv.dtype, pool.ssm.dtype) == (torch.bfloat16, torch.bfloat16)
    assert min(on.skipped(*range(1, 2 * COUNT))) >= 48
    found = differences(on, off)
    assert len(found) > 0.8 * 2 * COUNT * 8
    assert found.quantile(0.95) <= P95
    assert found.max() <= MOST
    assert found.max() > 1e-4  # they are not equal, so this is not a run in fp32


def test_fp32_states_are_equal(get_driver, get_oracle):
    on, off = play(build_driver(get_oracle, max_requests=30)), play(get_driver("hybrid", max_requests=30))
    assert differences(on, off).max() <= 1e-4


@pytest.mark.parametrize("which", ["conv", "ssm"])
def test_the_bounds_see_a_lost_state(get_driver, get_oracle, monkeypatch, which):
    """Negative control: in one layer of every snapshot."""

    def spoil(states: StepStates) -> None:
        keep(states)
        getattr(on.context.allocated.snapshots, which)[0] = 0.0

    on, off = build_driver(get_oracle, **BF16, max_requests=30), get_driver("hybrid", **BF16, max_requests=30)
    keep = StepStates.keep
    with monkeypatch.context() as patch:
        patch.setattr(StepStates, "keep", spoil)
        play(on)
    found = differences(on, play(off), first=COUNT)
    assert found.quantile(0.95) > P95
    assert found.max() > MOST
