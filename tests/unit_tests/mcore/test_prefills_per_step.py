"""SC-4, SC-5: what decides which prompts prefill in a step changes waiting times, but no output."""

from __future__ import annotations

import pytest

from megatron_ext.config import CacheConfig, batching
from tests.unit_tests.support.driver import assert_equals_oracle, assert_states_equal_oracle, make_prompt

PREFIX = make_prompt(64, seed=9)
PROMPTS = [[*PREFIX, *make_prompt(length, seed=length)] for length in (40, 9, 70, 25)] + [make_prompt(100), PREFIX]


@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_results_do_not_depend_on_the_share_of_decodes(get_driver, get_oracle, monkeypatch, share):
    """SC-4: logits and tokens beside a plain recompute, though the prompts are cut otherwise."""
    monkeypatch.setitem(batching.PREFILL_TOKENS_BESIDE_DECODES, "cpu", 32)
    driver = get_driver(cache=CacheConfig(snapshot_slots=20), block_size=16, max_tokens=400, decode_share=share)
    driver.add(0, make_prompt(20), num_tokens_to_generate=24)
    driver.step()
    for request_id, prompt in enumerate(PROMPTS, start=1):
        driver.add(request_id, prompt, num_tokens_to_generate=6)
    driver.run()
    for request_id in range(len(PROMPTS) + 1):
        assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
    lengths = [20, *map(len, PROMPTS)]
    beside = [
        sum(end - start for request, start, end in step if start < lengths[request])
        for step in driver.steps
        if any(start >= lengths[request] for request, start, _ in step)
    ]
    assert (max(beside) > 32) is (not share)


@pytest.mark.parametrize("overtake_tokens", [0, 20, 10**6])
def test_results_do_not_depend_on_the_schedule_policy(get_driver, get_oracle, overtake_tokens):
    """SC-5: logits, tokens and states beside a plain recompute; warm prompts go first within the budgets."""
    begun = []
    for policy in ("fcfs", "lpm"):
        driver = get_driver(
            cache=CacheConfig(snapshot_slots=20),
            block_size=16,
            max_tokens=100,
            max_requests=2,
            schedule_policy=policy,
            schedule_overtake_tokens=overtake_tokens,
        )
        driver.add(0, [*PREFIX, 1], num_tokens_to_generate=1, skip_prompt_log_probs=True)
        driver.run()
        colds, warms = [make_prompt(70 + i) for i in range(4)], [[*PREFIX, *make_prompt(9, seed=i)] for i in range(3)]
        for request_id, prompt in enumerate([*colds, *warms], start=1):
            driver.add(request_id, prompt, num_tokens_to_generate=6, skip_prompt_log_probs=True)
        driver.run()
        for request_id in range(8):
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
            assert_states_equal_oracle(driver, request_id, get_oracle("hybrid"))
        assert [driver.records[one].skipped_prefill_token_count for one in (5, 6, 7)] == [64, 64, 64]
        begun.append(list(dict.fromkeys(request for step in driver.steps for request, *_ in step)))
    assert begun[0] == [*range(8)]
    # A warm request charges 15 tokens that it computes and generates.
    overtaking = [5, 6, 7][: overtake_tokens // 15]
    assert begun[1][: 2 + len(overtaking)] == [0, *overtaking, 1]
