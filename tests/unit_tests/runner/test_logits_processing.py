"""SA-1, SA-2: logits processing gives the tokens of a plain recompute in Python's own numbers, in every life."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import pytest

from megatron_ext.config import CacheConfig, RequestParams
from megatron_ext.config.batching import LOGPROBS_MODES
from megatron_ext.runner import logits_processors
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request_events import EventType
from tests.on_request import long_except
from tests.unit_tests.runner.short_models import CONFIGS
from tests.unit_tests.support import choice
from tests.unit_tests.support.drafters import ANSWERS, Knowing
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.padded import PaddedDriver

COUNT = 14
DRAWN = {"temperature": 0.9, "seed": 7}
CASES: dict[str, dict] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.7, **DRAWN},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {"3": 2.5, 60: -100}, **DRAWN},
    "bad words": {"bad_words": ("<5>", "<7><9>")},
    "min_p": {"min_p": 0.2, **DRAWN},
    "all": {
        "presence_penalty": -0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {11: 1.5},
        "bad_words": ("<11>",),
        "min_p": 0.01,
        "top_k": 40,
        "top_p": 0.95,
        **DRAWN,
    },
    "best": {"top_k": 1, **DRAWN},  # without a seed the comparison would draw by chance
    "nothing": dict(DRAWN),
}
# Prompts share a block and a half, so that caches hit and tails differ.
PROMPTS = {name: make_prompt(24) + make_prompt(5, seed=i) for i, name in enumerate(CASES)}


@pytest.fixture(scope="module")
def model(get_oracle):
    return get_oracle("hybrid").model


@pytest.fixture(params=[Driver, PaddedDriver], ids=["eager", "captured"])
def new_driver(request: pytest.FixtureRequest, model) -> Callable[..., Driver]:
    """Make a driver of eager or of captured steps."""
    return functools.partial(request.param, model, CONFIGS["hybrid"])


def bad_words(params: RequestParams) -> list[tuple[int, ...]]:
    return [tuple(int(piece) for piece in word.strip("<>").split("><")) for word in params.bad_words]


@pytest.fixture(scope="module")
def wanted(model) -> dict[str, tuple[RequestParams, list[int]]]:
    """Parameters of each case, its words that must not come placed where they would come, and the recomputed tokens."""
    oracle, found = Oracle(model), {}
    for name, fields in CASES.items():
        params = RequestParams(num_tokens_to_generate=COUNT, **fields)
        if name == "bad words":
            free = oracle.greedy(PROMPTS[name], COUNT).tokens
            params = dataclasses.replace(params, bad_words=(f"<{free[0]}>", f"<{free[1]}><{free[2]}>", "<5><6>"))
        found[name] = params, choice.generate(oracle, PROMPTS[name], params, bad_words(params))
    return found


def run(driver: Driver, wanted: dict, names=tuple(CASES), *, between=lambda step: None) -> dict[str, list[int]]:
    for i, name in enumerate(names):
        driver.engine.add_request(i, PROMPTS[name], wanted[name][0])
    step = 0
    while driver.engine.has_unfinished_requests():
        driver.step()
        step += 1
        between(step)
    if isinstance(driver, PaddedDriver):
        assert len(driver.buckets) > 3, "steps larger than every bucket are eager"
    return {name: list(driver.records[i].generated_tokens) for i, name in enumerate(names)}


def expected(wanted: dict) -> dict[str, list[int]]:
    return {name: tokens for name, (_, tokens) in wanted.items()}


def test_each_changes_something(model, wanted):
    """A field that did nothing would pass all others here."""
    oracle = Oracle(model)
    plain = RequestParams(num_tokens_to_generate=COUNT)
    for name, (params, tokens) in wanted.items():
        drawn = dataclasses.replace(plain, temperature=params.temperature, seed=params.seed)
        assert (choice.generate(oracle, PROMPTS[name], drawn) != tokens) == (name != "nothing"), name


LIVES: dict[str, dict] = {
    "together": {},
    "alone": {"max_requests": 1},
    "in chunks of 10": {"max_tokens": 10, "max_requests": 8},
    "preempted": {"block_count": 12, "paused_buffer_size_gb": 0},
    "suspended twice": {},
}


@pytest.mark.parametrize("life", long_except(["alone", "preempted", "suspended twice"], LIVES))
def test_in_any_batch(new_driver, wanted, life):
    driver = new_driver(**LIVES[life])

    def between(step: int) -> None:
        if life == "suspended twice" and step in (3, 7):
            driver.engine.suspend()
            driver.engine.resume()

    assert run(driver, wanted, between=between) == expected(wanted)
    assert (driver.count(EventType.EVICT) > 0) == (life == "preempted")


def test_after_a_cached_prefix(new_driver, wanted):
    driver = new_driver(cache=CacheConfig(snapshot_slots=20))
    first = run(driver, wanted)
    skipped = driver.engine.core.counters.skipped_tokens
    driver.records.clear()
    assert run(driver, wanted) == first == expected(wanted)
    assert driver.engine.core.counters.skipped_tokens > skipped


@pytest.mark.parametrize("broken", ["prompt", "generated"])
def test_a_history_that_is_cut_is_seen(new_driver, wanted, monkeypatch, broken):
    """Negative control: without the prompt, or with what was generated last only, tokens differ."""
    previous, is_generated = logits_processors._previous_tokens, logits_processors._is_generated

    def keeps(sampling) -> np.ndarray:
        return is_generated(sampling) == (broken == "prompt")

    forgetful = dataclasses.replace(
        logits_processors.TOKEN_LISTS["previous"],
        of=lambda sampling, words: np.asarray(previous(sampling, words), dtype=np.int64)[keeps(sampling)],
        bits=lambda sampling: is_generated(sampling)[keeps(sampling)],
    )
    monkeypatch.setitem(logits_processors.TOKEN_LISTS, "previous", forgetful)
    names = ("repetition",) if broken == "prompt" else ("presence", "frequency")
    got = run(new_driver(), wanted, names)
    assert all(got[name] != wanted[name][1] for name in names)


SCORED = {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 3}
RAW, PROCESSED = LOGPROBS_MODES


def score(driver: Driver, wanted: dict, fields: dict = SCORED) -> dict[str, list[RequestRecord]]:
    """Run each case twice, with log-probs; of two equal prompts one is a fork where a step has room for both."""
    first = len(driver.records)
    for i, name in enumerate((*CASES, *CASES)):
        driver.engine.add_request(first + i, PROMPTS[name], dataclasses.replace(wanted[name][0], **fields))
    driver.run()
    return {name: [driver.records[first + i + j] for j in (0, len(CASES))] for i, name in enumerate(CASES)}


def assert_scores(records: dict[str, list[RequestRecord]], oracle: Oracle, wanted: dict, mode: str) -> None:
    """Compare with a plain recompute: the log-prob of each token, and of the best tokens."""
    for name, (params, tokens) in wanted.items():
        for record in records[name]:
            assert list(record.generated_tokens) == tokens
            for i, token in enumerate(tokens):
                logits = oracle.logits([*PROMPTS[name], *tokens[:i]])[-1]
                found = logits.log_softmax(-1).tolist()
                if mode == PROCESSED:
                    values = choice.shaped(logits.tolist(), PROMPTS[name], tokens[:i], params, bad_words(params))
                    found = choice.log_probs(values, params)
                assert math.isfinite(record.generated_log_probs[i])
                assert record.generated_log_probs[i] == pytest.approx(found[token], abs=2e-4), name
                listed = record.generated_top_n_log_probs[i]
                assert list(listed.values()) == pytest.approx(sorted(found, reverse=True)[:3], abs=2e-4), name
                assert list(listed.values()) == pytest.approx([found[one] for one in listed], abs=2e-4), name


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_log_probs_of_generated_tokens(new_driver, model, wanted, mode):
    """SA-16: raw ones are the model's own, processed ones of the distribution that the token was drawn from."""
    driver = new_driver(logprobs_mode=mode, cache=CacheConfig(snapshot_slots=20))
    for _ in ("cold", "after a hit"):
        records = score(driver, wanted)
        assert_scores(records, Oracle(model), wanted, mode)
    assert all(one.skipped_prefill_token_count for found in records.values() for one in found)


def test_log_probs_of_accepted_drafts(model, wanted):
    """SA-16: processed log-probs of tokens that were drafted, each after the drafts before it."""
    drafter = Knowing(ANSWERS["right_for_a_while"])
    drafter.truth = dict(enumerate([*PROMPTS[name], *wanted[name][1]] for name in (*CASES, *CASES)))
    driver = Driver(
        model, CONFIGS["hybrid"], logprobs_mode=PROCESSED, speculative_tokens=3, drafter=drafter, block_count=200
    )
    records = score(driver, wanted)
    assert driver.scheduler.counters.accepted > 20
    assert_scores(records, Oracle(model), wanted, PROCESSED)


def test_log_probs_of_prompts_are_raw_in_both_modes(model, wanted):
    """SA-16, RL-10: computed with the first token, and read back where they were kept."""
    found = []
    for mode in LOGPROBS_MODES:
        cache = CacheConfig(snapshot_slots=20, prefix_cache_log_probs=True)
        driver = Driver(model, CONFIGS["hybrid"], logprobs_mode=mode, cache=cache)
        first, again = (score(driver, wanted, {"return_log_probs": True}) for _ in range(2))
        assert all(records[0].skipped_prefill_token_count for records in again.values())
        found.append([records[0].prompt_log_probs for one in (first, again) for records in one.values()])
        assert first["all"][0].prompt_log_probs == pytest.approx(again["all"][0].prompt_log_probs, abs=2e-4)
    for raw, processed in zip(*found, strict=True):
        assert raw == pytest.approx(processed, abs=1e-6)
