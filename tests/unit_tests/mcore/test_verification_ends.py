"""SP-3, SP-5: options of a request take effect at the same token with and without drafts."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.request_events import EventType
from tests.unit_tests.support.drafters import (
    Knowing,
    Pair,
    assert_same,
    assert_same_cache,
    caching,
    right,
    right_for_a_while,
)
from tests.unit_tests.support.driver import Driver, make_prompt

COUNT = 7
PROMPT = make_prompt(13)
SAMPLED = {"temperature": 1.0, "seed": 11}


def serve(driver: Driver, metadata: list[dict]) -> Driver:
    """Serve one request after the other, and then the continuation of each."""
    for name, row_metadata in enumerate(metadata):
        prompt = row_metadata.get("prompt", PROMPT)
        fields = {"num_tokens_to_generate": 24, "skip_prompt_log_probs": True, "track_generated_token_events": True}
        driver.add(name, prompt, **(fields | {key: value for key, value in row_metadata.items() if key != "prompt"}))
        driver.run()
    for name in range(len(metadata)):
        record = driver.records[name]
        turn = [*record.prompt_tokens, *record.generated_tokens, *make_prompt(3, name)]
        driver.add(len(metadata) + name, turn, num_tokens_to_generate=3, skip_prompt_log_probs=True)
        driver.run()
    return driver


def check(pair: Pair, metadata: list[dict], answer=right_for_a_while) -> Driver:
    """Serve the requests with and without drafts and check that the outputs are equal."""
    serve(pair.plain, metadata)
    drafter = Knowing(answer, seed=len(metadata))
    drafter.truth = pair.truth()
    for name, known in drafter.truth.items():  # after its end, too
        drafter.truth[name] = (*known, *make_prompt(COUNT))
    driver = serve(pair.speculating(drafter, COUNT), metadata)
    assert_same(driver, pair.plain)
    assert_same_cache(driver, pair.plain)
    for name, record in driver.records.items():
        events = [event.payload for event in record.events if event.type is EventType.GENERATED_TOKEN]
        plain = [event.payload for event in pair.plain.records[name].events if event.type is EventType.GENERATED_TOKEN]
        assert events == plain
        assert record.accepted_token_count <= max(0, len(record.generated_tokens) - 1)
    assert driver.scheduler.counters.accepted > 20
    return driver


@pytest.fixture(scope="module")
def free(get_driver) -> tuple[int, ...]:
    """Tokens after the prompt without any end condition."""
    driver = get_driver("hybrid")
    driver.add(0, PROMPT, num_tokens_to_generate=24)
    return driver.run()[0].generated_tokens


def pair_of(get_driver, mode: str) -> Pair:
    return Pair(lambda **settings: get_driver("hybrid", **settings), cache=caching(mode))


def test_stop_words(get_driver, free):
    """Stop words of one and two tokens are ignored before the minimum length; blocks end after tokens 3 and 19."""
    words = [(f"<{free[i]}>",) for i in (2, 3, 18, 19)]
    words += [(f"<{free[i]}><{free[i + 1]}>", "never") for i in (2, 18)]
    metadata = [{"stop_words": one} for one in words] + [
        {"stop_words": one, "min_tokens": 5} for one in (words[0], words[1], words[4])
    ]
    driver = check(pair_of(get_driver, "kernel"), metadata)
    assert {record.finish_reason for record in driver.records.values()} == {"stop", "length"}


def test_end_tokens_and_lengths(get_driver, free):
    """An end within an accepted run drops the tokens after it; K never reaches beyond the last token."""
    metadata = [{"termination_id": free[i]} for i in (3, 4, 18, 19)]
    metadata += [{"termination_id": free[i], "min_tokens": fewest} for i, fewest in ((3, 4), (3, 5), (1, 24))]
    metadata += [{"num_tokens_to_generate": count} for count in (1, 2, 9)]
    metadata += [{"stop_token_ids": (free[6], free[12]), "ignore_eos": True}]
    check(pair_of(get_driver, "align"), metadata, right)


def test_logits_shaped_position_by_position(get_driver, free):
    """Penalties, biases, bad words, min_p, top-n: a row after drafts is processed as if they had been accepted."""
    metadata = [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.8, **SAMPLED},
        {"logit_bias": {free[2]: -100.0, 5: 2.0}, "top_n_logprobs": 4},
        {"bad_words": (f"<{free[1]}><{free[2]}>", f"<{free[5]}>")},
        {"min_p": 0.2, "top_k": 30, **SAMPLED},
        {"top_p": 0.9, **SAMPLED},
        {"min_tokens": 20, "termination_id": free[3], **SAMPLED},
        {"repetition_penalty": 0.8, "bad_words": (f"<{free[8]}>",), "top_n_logprobs": 2, **SAMPLED},
    ]
    check(pair_of(get_driver, "kernel"), metadata)
