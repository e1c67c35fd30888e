"""Cache on equals cache off, over policies, chunking and prompt lengths; and what is skipped is exactly the rule's.

`CachingDriver` compares every admission, account and KV write with token lists; the numbers here are literal.
"""

from __future__ import annotations

import pytest

from tests.priority import TestPriority
from tests.unit_tests.support.caching import BLOCK, POLICIES
from tests.unit_tests.support.driver import (
    Driver,
    assert_equals_expected,
    assert_equals_oracle,
    make_prompt,
    what_it_gave,
)

pytestmark = pytest.mark.priority(TestPriority.CRITICAL)

LENGTHS = [4 * BLOCK + offset for offset in (-1, 0, 1, 2)]
STEPS = [
    pytest.param({"max_tokens": 40}, id="chunked"),
    pytest.param({"max_tokens": 400, "enable_chunked_prefill": False}, id="whole"),
]


def play(driver: Driver, prompt: list[int]) -> None:
    """Serve a prompt and four that share its prefix: two while it lives, two long after it has ended."""
    other_end = [*prompt[: 2 * BLOCK + 3], *make_prompt(30, seed=1)]
    driver.add(0, prompt, num_tokens_to_generate=20)
    while not driver.engine.get_request(0).generated_count:
        driver.step()
    driver.add(1, prompt)
    driver.add(2, other_end)
    driver.add(3, prompt, skip_prompt_log_probs=False)
    driver.run()
    answer = list(driver.records[0].generated_tokens)
    driver.add(4, prompt)
    driver.run()
    driver.add(5, [*prompt, *answer, *make_prompt(5, seed=2)])
    driver.run()


def rule(length: int, policy: str) -> list[int]:
    """Tokens that each of the six requests skips."""
    own = min(length // BLOCK * BLOCK, length - 1)
    turn = (length + 19) // BLOCK * BLOCK  # what was generated last was never computed
    return [0, own, 2 * BLOCK, 0, *((own, turn) if policy == "lru" else (0, 0))]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("batching", STEPS)
@pytest.mark.parametrize("policy", POLICIES)
def test_cache_on_equals_cache_off(get_driver, get_caching_driver, oracle, policy, batching, length):
    """KV-2, KV-3, KV-4, KV-12, EX-1, EX-5: logits, log-probs and tokens; skipped tokens are min(M * b, P - 1)."""
    prompt = make_prompt(length)
    off, on = get_driver("attention_only", **batching), get_caching_driver(policy=policy, **batching)
    play(off, prompt)
    play(on, prompt)
    assert on.skipped(*range(6)) == rule(length, policy)
    for request_id in range(6):
        expected = what_it_gave(off, request_id)
        if request_id != 3:
            assert on.records[request_id].prompt_log_probs is None
        assert_equals_expected(on, request_id, expected)
        assert_equals_oracle(on, request_id, oracle)
    skipped = sum(rule(length, policy))
    assert on.engine.lifetime_skipped_token_count == skipped
    assert on.engine.lifetime_prefill_token_count == off.engine.lifetime_prefill_token_count - skipped


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_short_prompts(get_caching_driver, oracle, policy, length):
    """KV-12: a fully cached prompt computes one token; one that fills no block skips none."""
    driver = get_caching_driver(policy=policy)
    driver.add(0, make_prompt(length))
    driver.step()
    driver.add(1, make_prompt(length))
    driver.run()
    assert driver.skipped(1) == [{1: 0, 15: 0, 16: 15, 17: 16, 32: 31}[length]]
    assert driver.seen[1].chunks[0] == (driver.skipped(1)[0], length)
    for request_id in (0, 1):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("policy", POLICIES)
def test_duplicates_in_one_step(get_caching_driver, oracle, policy):
    """KV-6: four equal prompts at once are computed once; so is the common part of two that only begin alike."""
    driver = get_caching_driver(policy=policy)
    prompt = make_prompt(40)
    for request_id in range(4):
        driver.add(request_id, prompt)
    driver.add(4, [*prompt[:20], *make_prompt(20, seed=1)])
    driver.run()
    assert driver.skipped(*range(5)) == [0, 32, 32, 32, 16]
    assert driver.scheduler.counters.coordination_waits == 4
    assert driver.steps[0] == ((0, 0, 40),)
    for request_id in range(5):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_of_continuing_requests(get_caching_driver, oracle, policy):
    """KV-2: a prompt with a cached beginning whose rest takes several chunks; each chunk reads the shared blocks."""
    driver = get_caching_driver(policy=policy, max_tokens=30)
    prompt = make_prompt(50)
    driver.add(0, prompt, num_tokens_to_generate=20)
    for _ in range(3):
        driver.step()
    driver.add(1, [*prompt, *make_prompt(100, seed=1)])
    driver.run()
    assert driver.skipped(1) == [48]
    starts = [start for start, _ in driver.seen[1].chunks[:4]]
    assert starts == [48, 77, 106, 135]
    for request_id in (0, 1):
        assert_equals_oracle(driver, request_id, oracle)


def test_a_block_completed_in_mid_prefill_is_found(get_caching_driver, oracle):
    """KV-5: another hits the beginning of a prompt whose end is computed beside it, in the same step."""
    driver = get_caching_driver(max_tokens=40)
    prompt = make_prompt(90)
    driver.add(0, prompt)
    driver.step()
    driver.add(1, [*prompt[:33], *make_prompt(7, seed=1)])
    driver.run()
    assert driver.steps[2] == ((0, 80, 90), (1, 32, 40))
    for request_id in (0, 1):
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_whole_prefix_is_skipped_in_one_go(get_caching_driver, oracle, chunked):
    """FX-3: the step's budget counts computed tokens only, so a warm prompt longer than it needs one step."""
    driver = get_caching_driver(max_tokens=60, max_requests=4, enable_chunked_prefill=chunked)
    prompt = make_prompt(50)
    driver.add(0, prompt, num_tokens_to_generate=40)
    driver.run()
    turn = [*prompt, *driver.records[0].generated_tokens, *make_prompt(5, seed=1)]
    assert len(turn) == 95
    if not chunked:
        turn = turn[:60]
    driver.add(1, make_prompt(40, seed=3))
    driver.add(2, turn)
    driver.step()
    assert driver.steps[-1] == ((1, 0, 40), (2, 80, 95) if chunked else (2, 48, 60))
    assert [request.generated_count for request in driver.scheduler.queues.running] == [1, 1]
    driver.run()
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, oracle)
