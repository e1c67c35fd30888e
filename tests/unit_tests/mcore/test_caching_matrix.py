"""Cache on equals cache off, over models, policies, chunking and prompt lengths; tokens skipped are the rule's."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.unit_tests.support.caching import BLOCK
from tests.unit_tests.support.driver import (
    Driver,
    assert_equals_expected,
    assert_equals_oracle,
    make_prompt,
    outputs_of,
)
from tests.unit_tests.support.hybrid_caching import assert_prefill_states_equal, build_driver

CHUNKED, WHOLE = {"max_tokens": 70}, {"max_tokens": 700, "enable_chunked_prefill": False}
LRU, REF_ZERO, NO_SLOTS = {"policy": "lru"}, {"policy": "ref_zero"}, {"slots": 0}
LENGTHS = [4 * BLOCK + offset for offset in (-1, 0, 1, 3)]
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
    outputs = [driver.records[i * REQUESTS].generated_tokens for i in range(len(LENGTHS))]
    turns = {s: [*p, *a, *make_prompt(5, seed=2)] for (s, p), a in zip(prompts.items(), outputs, strict=True)}
    add(driver, 7, turns)
    driver.run()
    return driver


@functools.cache
def play_off(get_driver: Callable[..., Driver], kind: str, max_tokens: int, chunked: bool) -> Driver:
    """Outputs with the cache off, with which all engines with the cache on are compared."""
    return play(get_driver(kind, max_requests=40, max_tokens=max_tokens, enable_chunked_prefill=chunked))


def rule(kind: str, length: int, policy: str, slots: int) -> list[int]:
    """Tokens that each of a length's eight requests skips."""
    if slots == 0:
        return [0] * 8
    has_states = kind != "attention_only"  # it resumes at snapshots only, and must compute one token
    own = (length - 1) // BLOCK * BLOCK if has_states else min(length // BLOCK * BLOCK, length - 1)
    divergence = 0 if has_states else 2 * BLOCK
    follower = (2 * BLOCK + 3 + 30) // BLOCK * BLOCK
    if policy == "ref_zero":  # a request that arrives after all have ended finds nothing
        return [0, own, divergence, 0, follower, 0, 0, 0]
    turn = (length + 19) // BLOCK * BLOCK  # what was generated last was never computed
    return [0, own, divergence, 0, follower, 2 * BLOCK, own, turn]


CASES = [
    pytest.param("attention_only", CHUNKED, LRU, marks=pytest.mark.long),
    ("attention_only", WHOLE, REF_ZERO),
    ("hybrid", CHUNKED, LRU),
    pytest.param("hybrid", WHOLE, REF_ZERO, marks=pytest.mark.long),
    pytest.param("hybrid", CHUNKED, NO_SLOTS, marks=pytest.mark.long),
    ("attention_free", WHOLE, LRU),
]


@pytest.mark.parametrize(("kind", "batching", "cache"), CASES)
def test_cache_on_equals_cache_off(get_driver, get_oracle, kind, batching, cache):
    """KV-2, KV-4, KV-12, HY-3, HY-4, HY-6, HY-7, HY-13, HY-14, EX-1, EX-5: outputs, states, skipped tokens."""
    off = play_off(get_driver, kind, batching["max_tokens"], batching.get("enable_chunked_prefill", True))
    on = play(build_driver(get_oracle, kind, max_requests=40, **batching, **cache))
    skipped = [on.skipped(*range(i * REQUESTS, (i + 1) * REQUESTS)) for i in range(len(LENGTHS))]
    assert skipped == [rule(kind, length, cache.get("policy", "lru"), cache.get("slots", 1)) for length in LENGTHS]
    assert len(on.records) == len(LENGTHS) * REQUESTS
    for request_id in on.records:
        assert_equals_expected(on, request_id, outputs_of(off, request_id))
        if kind != "attention_only":
            assert_prefill_states_equal(on, off, request_id)
    for request_id in (1, 12, 23):
        assert_equals_oracle(on, request_id, get_oracle(kind))
    total = sum(map(sum, skipped))
    assert on.engine.core.counters.skipped_tokens == total
    assert on.engine.lifetime_prefill_token_count == off.engine.lifetime_prefill_token_count - total


def test_short_prompts(get_caching_driver, oracle):
    """KV-12: a fully cached prompt computes one token; one that fills no block skips none."""
    driver = get_caching_driver()
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        for request_id in (length, 100 + length):
            driver.add(request_id, make_prompt(length, seed=length))
            driver.run()
            assert_equals_oracle(driver, request_id, oracle)
    assert driver.skipped(101, 115, 116, 117, 132) == [0, 0, 15, 16, 31]
