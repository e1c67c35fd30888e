"""Request features on cached blocks work as without: sampling, stop words, alternatives, and events."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.record import RequestRecord
from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, POLICIES
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)

PROMPT = make_prompt(3 * BLOCK + 5)


def beside_another(driver: Driver, **params: object) -> RequestRecord:
    """The second of two requests with the same prompt."""
    driver.add(0, PROMPT, num_tokens_to_generate=20)
    driver.step()
    driver.add(1, PROMPT, **({"num_tokens_to_generate": 12, "skip_prompt_log_probs": True} | params))
    driver.run()
    return driver.records[1]


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"temperature": 0.8, "top_k": 20, "seed": 7}, id="sampled"),
        pytest.param({"temperature": 1.0, "top_p": 0.9}, id="seeded_by_the_engine"),
        pytest.param({"top_n_logprobs": 3}, id="alternatives"),
        pytest.param({"stop_words": ("<13>",)}, id="stop_words"),
        pytest.param({"return_log_probs": False}, id="no_log_probs"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_parameters(get_driver, get_caching_driver, policy, params):
    """KV-2: equal to the cache being off, with every kind of parameter."""
    off = beside_another(get_driver("attention_only"), **params)
    on = beside_another(get_caching_driver(policy=policy), **params)
    assert on.skipped_prefill_token_count == 48
    assert (on.generated_tokens, on.generated_text, on.finish_reason) == (
        off.generated_tokens,
        off.generated_text,
        off.finish_reason,
    )
    assert (on.generated_log_probs is None) == (off.generated_log_probs is None)
    if on.generated_log_probs is not None:
        assert on.generated_log_probs == pytest.approx(off.generated_log_probs, abs=1e-4, rel=1e-4)
    if params.get("top_n_logprobs"):
        for mine, theirs in zip(on.generated_top_n_log_probs, off.generated_top_n_log_probs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("params", [{"cache_salt": "a"}, {"enable_prefix_caching": False}])
def test_eviction_keeps_what_a_request_carries(get_caching_driver, oracle, params):
    """KV-10: salt, opt-out and the first token's time survive it: a stranger's block is there, and is not matched."""
    driver = get_caching_driver(block_count=4, paused_buffer_size_gb=0)
    driver.add(0, PROMPT[:20], num_tokens_to_generate=30)
    driver.add(1, PROMPT[:30], num_tokens_to_generate=20, **params)
    stranger = driver.engine.get_request(0)
    driver.step()
    while len(driver.model.books[1].matched) < 2:
        was_there = driver.scheduler.cache.match(stranger.block_hashes[:1])
        driver.step()
    assert was_there
    driver.run()
    assert driver.events(1) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "EVICT", "ADD_CONTEXT", "FINISH"]
    assert driver.model.books[1].matched == [0, 0]
    record = driver.records[1]
    assert record.ttft == record.events[2].timestamp - record.events[0].timestamp
    for request_id in range(2):
        assert_equals_oracle(driver, request_id, oracle)
