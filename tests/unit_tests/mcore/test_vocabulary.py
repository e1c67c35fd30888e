"""A model's vocabulary is larger than its tokenizer's: at the door, and in what is generated."""

from __future__ import annotations

import itertools

import pytest

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.offline.prompts import Prompt, tokenize_prompts
from megatron_ext.scheduling.record import Status
from megatron_ext.text.detokenizer import TextStream
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.tokenizers import PieceTokenizer

KNOWN = 60  # ids of the tokenizer, out of the model's 97


def make_driver(get_driver) -> Driver:
    return get_driver(tokenizer=PieceTokenizer(KNOWN))


def test_a_prompt_is_refused_at_the_door(get_driver):
    """SE-2: the prompt is refused before anything is queued, with the message of an offline run."""
    driver = make_driver(get_driver)
    with pytest.raises(ConfigError) as refused:
        driver.add(0, [5, KNOWN, 7])
    assert not driver.engine.has_unfinished_requests()
    driver.engine.check()
    prompts = [Prompt((5, KNOWN, 7), RequestParams(), "line 1")]
    with pytest.raises(ConfigError) as offline:
        tokenize_prompts(prompts, PieceTokenizer(KNOWN), 97)
    assert str(offline.value) == f"line 1: {refused.value}"
    assert str(refused.value).startswith(f"token id {KNOWN} has no token in the tokenizer, which ends at {KNOWN - 1}")


@pytest.mark.parametrize("stop_words", [(), ("no such word",)])
def test_a_generated_id_without_a_token_is_empty_text(get_driver, stop_words):
    """SE-2: such an id gives empty text in records, for stop words, and in streams; the request runs to its end."""
    driver = make_driver(get_driver)
    prompt = [token % KNOWN for token in make_prompt(20)]
    driver.add(0, prompt, num_tokens_to_generate=30, stop_words=stop_words)
    record = driver.run()[0]
    assert record.status is Status.COMPLETED
    unknown = [token for token in record.generated_tokens if token >= KNOWN]
    assert 0 < len(unknown) < 30
    assert record.generated_text == "".join(f"<{token}>" for token in record.generated_tokens if token < KNOWN)
    stream = TextStream(stop_words, driver.engine.controller.vocabulary.detokenize)
    sent = [stream.feed([token]) for token in record.generated_tokens[:-1]]
    assert "".join(sent) + stream.finish(record.generated_text) == record.generated_text


def test_a_stop_word_after_one(get_driver):
    """A stop word is found across tokens that read as nothing."""
    driver = make_driver(get_driver)
    prompt = [token % KNOWN for token in make_prompt(20)]
    driver.add(0, prompt, temperature=3.0, seed=4, num_tokens_to_generate=30)
    tokens = driver.run()[0].generated_tokens
    known = [i for i, token in enumerate(tokens) if token < KNOWN]
    before, after = next((i, j) for i, j in itertools.pairwise(known) if j > i + 1)
    word = f"<{tokens[before]}><{tokens[after]}>"
    driver = make_driver(get_driver)
    driver.add(0, prompt, temperature=3.0, seed=4, num_tokens_to_generate=30, stop_words=(word,))
    record = driver.run()[0]
    assert (record.finish_reason, record.generated_tokens) == ("stop", tokens[: after + 1])
    assert word not in record.generated_text


def test_a_prompt_of_ids_is_never_read(get_driver):
    """SE-2: no call of the tokenizer has a token of the prompt in it, neither for the record nor for stop words."""
    seen: set[int] = set()

    class Noting(PieceTokenizer):
        def detokenize(self, ids, skip_special_tokens=True):
            seen.update(ids)
            return super().detokenize(ids, skip_special_tokens)

    driver = get_driver(tokenizer=Noting(97))
    prompt = make_prompt(20)
    driver.add(0, prompt, num_tokens_to_generate=8)
    driver.add(1, prompt, num_tokens_to_generate=8, stop_words=("no such word",))
    driver.run()
    generated = {*driver.records[0].generated_tokens, *driver.records[1].generated_tokens}
    assert seen == generated
    assert set(prompt) - generated, "the prompt says nothing that the answer does not"
    assert [driver.records[request_id].prompt_text for request_id in (0, 1)] == [None, None]


def test_the_text_that_ids_were_made_of(get_driver):
    """Is in the record as it was given; a text that is the prompt is so by itself."""
    driver = get_driver()
    driver.engine.add_request(0, make_prompt(5), RequestParams(num_tokens_to_generate=1), prompt_text="as submitted")
    driver.engine.add_request(1, "<5><6>", RequestParams(num_tokens_to_generate=1))
    records = {}
    while driver.engine.has_unfinished_requests():
        records |= {one.request_id: one for one in driver.engine.step_modern()["finished_request_records"]}
    assert [records[request_id].prompt_text for request_id in (0, 1)] == ["as submitted", "<5><6>"]
    assert records[0].prompt_tokens == tuple(make_prompt(5))
