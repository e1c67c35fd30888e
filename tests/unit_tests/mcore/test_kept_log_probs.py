"""RL-10: log-probs of prompts that are kept with their blocks; requests for them skip like others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from unittest import mock

import pytest

from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.runner import step_output
from megatron_ext.scheduling.explain_admission import explain_admission
from megatron_ext.scheduling.record import Status
from tests.unit_tests.mcore.test_caching_matrix import (
    BLOCK,
    CHUNKED,
    LENGTHS,
    LRU,
    NO_SLOTS,
    REF_ZERO,
    REQUESTS,
    WHOLE,
    rule,
)
from tests.unit_tests.mcore.test_caching_matrix import play as play_any
from tests.unit_tests.models.test_durable_cache import started
from tests.unit_tests.support.driver import (
    Driver,
    assert_equals_expected,
    assert_equals_oracle,
    make_prompt,
    outputs_of,
)
from tests.unit_tests.support.hybrid_caching import build_driver

PROMPT = make_prompt(4 * BLOCK + 5)
SCORED = {"skip_prompt_log_probs": False, "num_tokens_to_generate": 3}


def play(driver: Driver) -> Driver:
    """The requests of the other matrix, each for the log-probs of its prompt."""
    add = driver.add
    driver.add = lambda *args, **params: add(*args, **(params | {"skip_prompt_log_probs": False}))
    return play_any(driver)


@functools.cache
def play_off(get_driver: Callable[..., Driver], kind: str, max_tokens: int, chunked: bool) -> Driver:
    return play(get_driver(kind, max_requests=40, max_tokens=max_tokens, enable_chunked_prefill=chunked))


def rule_of_scored(kind: str, length: int, policy: str, slots: int) -> list[int]:
    """Tokens that each of a length's eight requests skips: as without log-probs, up to what was generated."""
    skipped = rule(kind, length, policy, slots)
    skipped[3] = skipped[1]  # the same prompt; it asks for log-probs there, too
    skipped[7] = min(skipped[7], length // BLOCK * BLOCK)
    return skipped


@pytest.mark.parametrize(
    ("kind", "batching", "cache"),
    [
        pytest.param("attention_only", CHUNKED, LRU, marks=pytest.mark.long),
        ("attention_only", WHOLE, REF_ZERO),
        ("hybrid", CHUNKED, LRU),
        pytest.param("hybrid", WHOLE, REF_ZERO, marks=pytest.mark.long),
        pytest.param("hybrid", CHUNKED, NO_SLOTS, marks=pytest.mark.long),
        pytest.param("attention_free", WHOLE, LRU, marks=pytest.mark.long),
    ],
)
def test_scored_requests_skip_like_others(get_driver, get_oracle, kind, batching, cache):
    """RL-10, EX-5: log-probs at every position, and the tokens skipped."""
    off = play_off(get_driver, kind, batching["max_tokens"], batching.get("enable_chunked_prefill", True))
    on = play(build_driver(get_oracle, kind, max_requests=40, log_probs=True, **batching, **cache))
    skipped = [on.skipped(*range(i * REQUESTS, (i + 1) * REQUESTS)) for i in range(len(LENGTHS))]
    policy, slots = cache.get("policy", "lru"), cache.get("slots", 1)
    assert skipped == [rule_of_scored(kind, length, policy, slots) for length in LENGTHS]
    for request_id in on.records:
        assert_equals_expected(on, request_id, outputs_of(off, request_id))
    for request_id in (1, 12, 23):
        assert_equals_oracle(on, request_id, get_oracle(kind))


def serve(driver: Driver, name: int, prompt: Sequence[int], **params: object) -> int:
    """Serve one prompt to its end; return the tokens that it skipped."""
    driver.add(name, prompt, **(SCORED | params))
    driver.run()
    return driver.records[name].skipped_prefill_token_count


def explained(driver: Driver, name: int) -> tuple[str, dict[str, int]]:
    record = driver.records[name]
    return record.prefix_cache_explanation.reason, record.prefill_reasons


@pytest.mark.parametrize("kind", ["attention_only", "hybrid"])
def test_blocks_of_requests_that_did_not_ask(get_oracle, kind):
    """RL-10, EX-2: they have no log-probs: all is computed, which is explained, and kept for the next request."""
    driver = build_driver(get_oracle, kind, log_probs=True)
    scheduler = driver.scheduler
    explain = functools.partial(explain_admission, cache=scheduler.cache, block_size=scheduler.limits.block_size)
    scheduler.admission_observers.append(explain)
    whole = 4 * BLOCK
    assert serve(driver, 0, PROMPT, skip_prompt_log_probs=True) == 0
    assert serve(driver, 1, PROMPT) == 0
    assert explained(driver, 1) == ("no_log_probs", {"prompt_logprobs": whole, "partial_block": 5})
    assert driver.matched[1] == [4]
    assert serve(driver, 2, PROMPT) == whole
    assert explained(driver, 2) == ("skipped_all", {"partial_block": 5})
    answer = driver.records[0].generated_tokens
    assert serve(driver, 3, [*PROMPT, *answer, *make_prompt(30)]) == whole
    assert serve(driver, 4, PROMPT, top_n_logprobs=2) == 0
    assert explained(driver, 4) == ("prompt_logprobs", {"prompt_logprobs": len(PROMPT)})
    for name in range(5):
        assert_equals_oracle(driver, name, get_oracle(kind))


def test_what_forgets(get_oracle):
    """RL-10, EX-3, EX-4: other salts, new weights, a reset and a suspend that drops have no log-probs."""
    driver = build_driver(get_oracle, log_probs=True)
    engine, whole = driver.engine, 4 * BLOCK
    assert [serve(driver, 0, PROMPT), serve(driver, 1, PROMPT)] == [0, whole]
    assert serve(driver, 2, PROMPT, cache_salt="other") == 0
    for i, forget in enumerate((engine.reset_prefix_cache, engine.weights_changed, lambda: suspend(driver))):
        forget()
        assert not driver.scheduler.cache.kept._kept[DataKind.LOG_PROBS]
        assert [serve(driver, 10 + 2 * i, PROMPT), serve(driver, 11 + 2 * i, PROMPT)] == [0, whole]
    for name in driver.records:
        assert_equals_oracle(driver, name, get_oracle("hybrid"))


def suspend(driver: Driver) -> None:
    driver.engine.suspend()
    driver.engine.resume()


def test_entries_from_disk_have_none(get_driver, get_oracle, tmp_path):
    """RL-10, DC-1: blocks that a new process puts back are computed for their log-probs, and have them then."""
    settings = {"prefix_cache_log_probs": True}
    driver = started(get_driver, tmp_path / "cache", cache=settings)
    assert [serve(driver, 0, PROMPT), serve(driver, 1, PROMPT)] == [0, 4 * BLOCK]
    driver.engine.close()
    driver = started(get_driver, tmp_path / "cache", cache=settings)
    assert serve(driver, 0, PROMPT, skip_prompt_log_probs=True) == 4 * BLOCK
    assert [serve(driver, 1, PROMPT), serve(driver, 2, PROMPT)] == [0, 4 * BLOCK]
    for name in range(3):
        assert_equals_oracle(driver, name, get_oracle("hybrid"))
    driver.engine.close()


DAMAGES = {
    "log-probs of other tokens": lambda pool: pool.values.copy_(pool.values.roll(1, 1)),
    "states of other blocks": lambda pool: pool.hidden_states.copy_(pool.hidden_states.roll(1, 0)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_ones_are_noticed(get_oracle, damage):
    """Negative control: numbers that are shifted by a token, or by a block."""
    driver = build_driver(get_oracle, log_probs=True)
    serve(driver, 0, PROMPT)
    serve(driver, 1, PROMPT)
    assert_equals_oracle(driver, 1, get_oracle("hybrid"))
    DAMAGES[damage](driver.context.allocated.log_probs)
    assert serve(driver, 2, PROMPT) == 4 * BLOCK
    with pytest.raises(AssertionError, match="prompt log-probs"):
        assert_equals_oracle(driver, 2, get_oracle("hybrid"))


def test_a_scoring_that_fails_leaves_none(get_oracle, monkeypatch):
    """RL-10, SE-2: blocks whose log-probs were not written are computed by the next request."""
    driver = build_driver(get_oracle, log_probs=True)
    assert serve(driver, 0, PROMPT[: 2 * BLOCK + 1]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(step_output, "score_rows", mock.Mock(side_effect=MemoryError("planted")))
        driver.add(1, PROMPT, num_tokens_to_generate=0, skip_prompt_log_probs=False)
        driver.run()
    assert driver.records[1].status is Status.FAILED
    assert serve(driver, 2, PROMPT) == 2 * BLOCK
    assert serve(driver, 3, PROMPT) == 4 * BLOCK
    for name in (0, 2, 3):
        assert_equals_oracle(driver, name, get_oracle("hybrid"))
