"""Cache on equals cache off with recurrent layers, and what is skipped is exactly what the rule of the design gives.

`HybridDriver` compares every admission, account, snapshot and KV write with token lists; the numbers here are literal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
    pytest.param({"max_tokens": 70}, id="chunked"),
    pytest.param({"max_tokens": 700, "enable_chunked_prefill": False}, id="whole"),
]
LENGTHS = [4 * BLOCK + offset for offset in (-1, 0, 1, 2, 3)]
OTHER_END = make_prompt(30, seed=1)
LONG = {"num_tokens_to_generate": 20}
REQUESTS = 8  # of each length


def add(driver: Driver, number: int, prompts: dict[str, list[int]], **params: object) -> None:
    """Add a request for each prompt; requests of different lengths have different salts, and nothing in common."""
    for i, (salt, prompt) in enumerate(prompts.items()):
        params = {"num_tokens_to_generate": 3, "cache_salt": salt} | params
        driver.add(number + i * REQUESTS, prompt, **params)


def play(driver: Driver) -> Driver:
    """Prompts, and others that share them: some while they live, one that follows another, some when all have ended."""
    prompts = {str(length): make_prompt(length) for length in LENGTHS}
    add(driver, 0, prompts, **LONG)
    while not all(request.generated_count for request in driver.scheduler.queues):
        driver.step()
    add(driver, 1, prompts)
    add(driver, 2, {salt: [*prompt[: 2 * BLOCK + 3], *OTHER_END] for salt, prompt in prompts.items()}, **LONG)
    add(driver, 3, prompts, skip_prompt_log_probs=False)
    add(driver, 4, {salt: [*prompt[: 2 * BLOCK + 3], *OTHER_END, 7] for salt, prompt in prompts.items()})
    driver.run()
    add(driver, 5, {salt: [*prompt[: 2 * BLOCK + 9], *make_prompt(20, seed=3)] for salt, prompt in prompts.items()})
    driver.run()
    add(driver, 6, prompts)
    driver.run()
    answers = [driver.records[i * REQUESTS].generated_tokens for i in range(len(LENGTHS))]
    turns = {s: [*p, *a, *make_prompt(5, seed=2)] for (s, p), a in zip(prompts.items(), answers, strict=True)}
    add(driver, 7, turns)
    driver.run()
    return driver


@functools.cache
def play_off(get_driver: Callable[..., Driver], kind: str, max_tokens: int, chunked: bool) -> Driver:
    """Outputs with the cache off, with which all engines with the cache on are compared."""
    return play(get_driver(kind, max_requests=40, max_tokens=max_tokens, enable_chunked_prefill=chunked))


def rule(length: int, policy: str, slots: int) -> list[int]:
    """Tokens that each of a length's eight requests skips."""
    if slots == 0:
        return [0] * 8
    own = (length - 1) // BLOCK * BLOCK
    follower = (2 * BLOCK + 3 + 30) // BLOCK * BLOCK
    if policy == "ref_zero":  # a request that arrives after all have ended finds nothing
        return [0, own, 0, 0, follower, 0, 0, 0]
    turn = (length + 19) // BLOCK * BLOCK  # what was generated last was never computed
    return [0, own, 0, 0, follower, 2 * BLOCK, own, turn]


@pytest.mark.parametrize("batching", STEPS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("kind", "slots"), MODELS)
def test_cache_on_equals_cache_off(get_driver, get_oracle, kind, slots, policy, batching):
    """HY-3, HY-4, HY-6, HY-7, HY-13, HY-14, EX-1, EX-5, KV-12: tokens, logits, log-probs, states, skipped tokens."""
    off = play_off(get_driver, kind, batching["max_tokens"], batching.get("enable_chunked_prefill", True))
    on = play(build_driver(get_oracle, kind, policy=policy, slots=slots, max_requests=40, **batching))
    skipped = [on.skipped(*range(i * REQUESTS, (i + 1) * REQUESTS)) for i in range(len(LENGTHS))]
    assert skipped == [rule(length, policy, slots) for length in LENGTHS]
    assert len(on.records) == len(LENGTHS) * REQUESTS
    for request_id in on.records:
        assert_equals_expected(on, request_id, what_it_gave(off, request_id))
        assert_prefill_states_equal(on, off, request_id)
    for request_id in (1, 12, 23):
        assert_equals_oracle(on, request_id, get_oracle(kind))
