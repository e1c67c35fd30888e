"""Cache on equals cache off with recurrent layers, and what is skipped is exactly what the rule of the design gives.

`HybridDriver` compares every admission, account, snapshot and KV write with token lists; the numbers here are literal.
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
from tests.unit_tests.support.hybrid_caching import PLENTY, assert_prefill_states_equal, build_driver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

MODELS = [
    pytest.param("hybrid", PLENTY, id="hybrid"),
    pytest.param("hybrid", 0, id="hybrid_without_slots"),
    pytest.param("attention_free", PLENTY, id="attention_free"),
]
STEPS = [
    pytest.param({"max_tokens": 39}, id="chunked"),
    pytest.param({"max_tokens": 400, "enable_chunked_prefill": False}, id="whole"),
]
LENGTHS = [4 * BLOCK + offset for offset in (-1, 0, 1, 2, 3)]
OTHER_END = make_prompt(30, seed=1)


def play(driver: Driver, prompt: list[int]) -> None:
    """A prompt, and others that share it: some while it lives, one that follows another, some when all have ended."""
    driver.add(0, prompt, num_tokens_to_generate=20)
    while not driver.engine.get_request(0).generated_count:
        driver.step()
    driver.add(1, prompt)
    driver.add(2, [*prompt[: 2 * BLOCK + 3], *OTHER_END])
    driver.add(3, prompt, skip_prompt_log_probs=False)
    driver.add(4, [*prompt[: 2 * BLOCK + 3], *OTHER_END, 7])
    driver.run()
    driver.add(5, [*prompt[: 2 * BLOCK + 9], *make_prompt(20, seed=3)])
    driver.run()
    driver.add(6, prompt)
    driver.run()
    turn = [*prompt, *driver.records[0].generated_tokens, *make_prompt(5, seed=2)]
    driver.add(7, turn)
    driver.run()


def rule(length: int, policy: str, slots: int) -> list[int]:
    """Tokens that each of the eight requests skips."""
    if slots == 0:
        return [0] * 8
    own = (length - 1) // BLOCK * BLOCK
    follower = (2 * BLOCK + 3 + 30) // BLOCK * BLOCK
    if policy == "ref_zero":  # the first lives for 20 tokens; whoever comes later finds nothing
        return [0, own, 0, 0, follower, 0, 0, 0]
    turn = (length + 19) // BLOCK * BLOCK  # what was generated last was never computed
    return [0, own, 0, 0, follower, 2 * BLOCK, own, turn]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("batching", STEPS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "slots"), MODELS)
def test_cache_on_equals_cache_off(get_driver, get_oracle, kind, slots, policy, batching, length):
    """HY-3, HY-4, HY-6, HY-7, HY-13, HY-14, EX-1, EX-5, KV-12: tokens, logits, log-probs, states, skipped tokens."""
    prompt = make_prompt(length)
    off = get_driver(kind, **batching)
    on = build_driver(get_oracle, kind, policy=policy, slots=slots, **batching)
    play(off, prompt)
    play(on, prompt)
    assert on.skipped(*range(8)) == rule(length, policy, slots)
    for request_id in range(8):
        assert_equals_expected(on, request_id, what_it_gave(off, request_id))
        assert_prefill_states_equal(on, off, request_id)
    for request_id in (1, 4, 7):
        assert_equals_oracle(on, request_id, get_oracle(kind))
