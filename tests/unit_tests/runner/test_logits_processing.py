"""SA-1, SA-2: logits processing gives the tokens of a plain recompute in Python's own numbers, in every life."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest

from megatron_ext.config import CacheConfig, RequestParams
from megatron_ext.runner import logits_processors
from megatron_ext.scheduling.request_events import EventType
from tests.on_request import long_except
from tests.priority import TestPriority
from tests.unit_tests.runner.short_models import CONFIGS
from tests.unit_tests.support import choice
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.padded import PaddedDriver

pytestmark = pytest.mark.priority(TestPriority.HIGH)

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
}


@pytest.mark.parametrize("life", long_except(["alone", "preempted"], LIVES))
def test_in_any_batch(new_driver, wanted, life):
    driver = new_driver(**LIVES[life])
    assert run(driver, wanted) == expected(wanted)
    assert (driver.count(EventType.EVICT) > 0) == (life == "preempted")


def test_suspended_twice(new_driver, wanted):
    driver = new_driver()

    def between(step: int) -> None:
        if step in (3, 7):
            driver.engine.suspend()
            driver.engine.resume()

    assert run(driver, wanted, between=between) == expected(wanted)


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


def test_log_probs_are_the_models_own(new_driver, model, wanted):
    """Log-probs do not show the logits processing before the choice."""
    driver, oracle = new_driver(), Oracle(model)
    params = dataclasses.replace(wanted["all"][0], return_log_probs=True, top_n_logprobs=3, skip_prompt_log_probs=True)
    driver.engine.add_request(0, PROMPTS["all"], params)
    record = driver.run()[0]
    tokens = [*PROMPTS["all"], *record.generated_tokens]
    for i, (token, log_prob) in enumerate(zip(record.generated_tokens, record.generated_log_probs, strict=True)):
        scores = oracle.logits(tokens[: len(PROMPTS["all"]) + i])[-1].log_softmax(-1)
        assert log_prob == pytest.approx(float(scores[token]), abs=1e-4)
        assert list(record.generated_top_n_log_probs[i]) == scores.topk(3).indices.tolist()
