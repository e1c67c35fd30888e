"""A model's vocabulary is larger than its tokenizer's: at the door, and in what is generated."""

from __future__ import annotations

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
