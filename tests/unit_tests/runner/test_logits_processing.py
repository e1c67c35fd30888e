"""SA-1, SA-2: logits processing gives the tokens of a plain recompute in Python's own numbers, in every life."""

from __future__ import annotations

import dataclasses
from array import array

import pytest
import torch

from megatron_ext.config import CacheConfig, RequestParams
from megatron_ext.config.token_biases import NO_BIASES
from megatron_ext.mcore import controller
from megatron_ext.ops.sampling import logits_processors as operators
from megatron_ext.runner.logits_processing import process_logits
from megatron_ext.runner.model_input import SamplingRow
from megatron_ext.scheduling.logits_options import LogitsOptions
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.scheduling.step import Sampling
from tests.priority import TestPriority
from tests.unit_tests.support import choice
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.oracle import Oracle

pytestmark = pytest.mark.priority(TestPriority.HIGH)

COUNT = 14
DRAWN = {"temperature": 0.9, "seed": 7}
CASES: dict[str, dict] = {
    "presence": {"presence_penalty": 1.5},
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
def model():
    return build_slow_decay(HYBRID)


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


@pytest.mark.parametrize("name", CASES)
def test_alone(model, wanted, name):
    assert run(Driver(model, HYBRID), wanted, (name,)) == {name: wanted[name][1]}


LIVES: dict[str, dict] = {
    "together": {},
    "in chunks of 10": {"max_tokens": 10, "max_requests": 8},
    "preempted": {"block_count": 12, "paused_buffer_size_gb": 0},
}


@pytest.mark.parametrize("life", LIVES)
def test_in_any_batch(model, wanted, life):
    driver = Driver(model, HYBRID, **LIVES[life])
    assert run(driver, wanted) == expected(wanted)
    assert (driver.count(EventType.EVICT) > 0) == (life == "preempted")


def test_suspended_twice(model, wanted):
    driver = Driver(model, HYBRID)

    def between(step: int) -> None:
        if step in (3, 7):
            driver.engine.suspend()
            driver.engine.resume()

    assert run(driver, wanted, between=between) == expected(wanted)


def test_behind_a_cached_prefix(model, wanted):
    driver = Driver(model, HYBRID, cache=CacheConfig(snapshot_slots=20))
    first = run(driver, wanted)
    skipped = driver.engine.lifetime_skipped_token_count
    driver.records.clear()
    assert run(driver, wanted) == first == expected(wanted)
    assert driver.engine.lifetime_skipped_token_count > skipped


@pytest.mark.parametrize("broken", ["prompt", "generated"])
def test_a_history_that_is_cut_is_seen(model, wanted, monkeypatch, broken):
    """Negative control: without the prompt, or with what was generated last only, tokens differ."""
    penalize = operators.penalize

    def forgetful(logits, before, *factors):
        keep = (before.counts > 0) == (broken == "prompt")
        penalize(logits, operators.CameBefore(before.rows[keep], before.tokens[keep], before.counts[keep]), *factors)

    monkeypatch.setattr("megatron_ext.runner.logits_processing.penalize", forgetful)
    names = ("repetition",) if broken == "prompt" else ("presence", "frequency")
    got = run(Driver(model, HYBRID), wanted, names)
    assert all(got[name] != wanted[name][1] for name in names)


def test_log_probs_are_the_models_own(model, wanted):
    """Log-probs do not show the logits processing before the choice."""
    driver, oracle = Driver(model, HYBRID), Oracle(model)
    params = dataclasses.replace(wanted["all"][0], return_log_probs=True, top_n_logprobs=3, skip_prompt_log_probs=True)
    driver.engine.add_request(0, PROMPTS["all"], params)
    record = driver.run()[0]
    tokens = [*PROMPTS["all"], *record.generated_tokens]
    for i, (token, log_prob) in enumerate(zip(record.generated_tokens, record.generated_log_probs, strict=True)):
        scores = oracle.logits(tokens[: len(PROMPTS["all"]) + i])[-1].log_softmax(-1)
        assert log_prob == pytest.approx(float(scores[token]), abs=1e-4)
        assert list(record.generated_top_n_log_probs[i]) == scores.topk(3).indices.tolist()


def test_rows_that_ask_for_nothing_are_not_touched(model, wanted, monkeypatch):
    """Rows without options are sampled from the unchanged logits."""
    seen = []
    sample = controller._sample
    monkeypatch.setattr(controller, "_sample", lambda logits, rows: seen.append(len(rows)) or sample(logits, rows))
    monkeypatch.setattr(controller, "process_logits", None)
    assert run(Driver(model, HYBRID), wanted, ("nothing",)) == {"nothing": wanted["nothing"][1]}
    assert seen == [1] * COUNT


class TestOperators:
    def test_in_16_bits_the_choice_is_made_in_32(self):
        """A penalty of a hundredth is below bfloat16's steps at these logits."""
        logits = torch.tensor([[8.0, 8.0, 1.0]], dtype=torch.bfloat16)
        row_metadata = LogitsOptions(array("I", [1, 0]), 1, 1.0, 0.01, 0.0, NO_BIASES, (), 0.0)
        row = SamplingRow(0, Sampling(0.0, 0, 0.0, None, (), None, row_metadata))
        assert controller._choose(logits, [row]).tolist() == [1]

    def test_bad_words_are_looked_for_in_the_answer(self):
        """SA-1: a word whose first token ends the prompt may still begin there."""
        for prompt, ruled_out in ((2, []), (1, [6]), (0, [6])):
            row_metadata = LogitsOptions(array("I", [4, 5]), prompt, 1.0, 0.0, 0.0, NO_BIASES, ((5, 6),), 0.0)
            assert row_metadata.ruled_out == ruled_out, f"a prompt of {prompt}"

    def test_min_p_is_a_share_of_the_best_token_that_may_come(self):
        """SA-1: a forbidden token is gone before, though it be far better than the others."""
        values = torch.tensor([[9.0, 2.0, 1.9, -5.0]])
        row_metadata = LogitsOptions(array("I"), 0, 1.0, 0.0, 0.0, NO_BIASES, (), 0.5)
        row = SamplingRow(0, Sampling(1.0, 0, 0.0, None, (0,), None, row_metadata))
        process_logits(values, [row])
        assert values.isfinite().tolist() == [[False, True, True, False]]

    def test_a_row_keeps_what_it_has_where_nothing_would_be_left(self):
        logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
        operators.rule_out(logits, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
        assert logits.tolist() == [[1.0, 2.0], [1.0, -torch.inf]]

    def test_only_allowed_words_are_kept(self):
        logits = torch.zeros(2, 70)
        masks = torch.zeros(1, 3, dtype=torch.int32)
        masks[0, 0], masks[0, 2] = -(2**31) + 2, 32  # words 1, 31 and 69
        operators.keep_allowed(logits, torch.tensor([1]), masks)
        assert logits[0].tolist() == [0.0] * 70
        assert (logits[1] == 0).nonzero().flatten().tolist() == [1, 31, 69]
        assert torch.equal(operators._bits(masks), operators.bits_anywhere(masks))
        operators.keep_allowed(logits, torch.tensor([0, 1]), masks.expand(2, -1).contiguous())
        assert torch.equal(logits[0], logits[1])
