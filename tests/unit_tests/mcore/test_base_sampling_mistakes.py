"""Mistakes of megatron-core 0.16.1 in sampling and stop words that ours must not make: one test (or class) for each."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.request_events import EventType
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt
from tests.unit_tests.support.tokenizers import PieceTokenizer


class TestStopWords:
    """Stop words: the base computes one forward too many, keeps its log-prob, and knows only its own tokenisation."""

    PROMPT = make_prompt(9)

    def stopped(self, get_driver, get_oracle, pieces: list[str], stop_words: tuple[str, ...], **params: object):
        """A greedy run in which the oracle's tokens read as `pieces`; record and driver."""
        expected = get_oracle("hybrid").greedy(self.PROMPT, len(pieces))
        assert len(set(expected.tokens)) == len(pieces), "choose another prompt"
        names = dict(zip(expected.tokens, pieces, strict=True))
        unused = next(token for token in range(97) if token not in names)
        driver = get_driver("hybrid", tokenizer=PieceTokenizer(97, names | {unused: stop_words[0]}))
        assert driver.engine.controller.tokenizer.tokenize(stop_words[0]) == [unused]
        driver.add(0, self.PROMPT, num_tokens_to_generate=8, stop_words=stop_words, **params)
        driver.run()
        return driver.records[0], driver, expected

    @pytest.mark.parametrize("with_log_probs", [True, False])
    def test_matched_in_another_tokenisation(self, get_driver, get_oracle, with_log_probs):
        pieces = ["one ", "two", " st", "op", " more"]
        record, driver, expected = self.stopped(
            get_driver, get_oracle, pieces, ("stop",), return_log_probs=with_log_probs
        )
        assert record.finish_reason == "stop"
        assert record.generated_text == "one two "
        assert record.generated_tokens == expected.tokens[:4]  # they end with the one that completed it
        assert record.step_count == len(driver.steps) == 4  # the prefill gave the first token
        assert driver.steps[-1] == ((0, 11, 12),)
        if with_log_probs:
            assert len(record.generated_log_probs) == 4
        assert_equals_oracle(driver, 0, get_oracle("hybrid"))


class TestSampling:
    """Sampling: in the base temperature 0 divides by zero, top_k with top_p kills the batch, rows share a generator."""

    WAYS = (
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
        {"temperature": 1.0, "top_k": 1, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.7, "seed": 3},
        {"temperature": 1.3, "top_p": 0.9, "seed": 4},
        {"temperature": 2.0, "top_k": 20, "seed": 5},
        {"temperature": 1.0, "seed": 6},
        {"temperature": 1.0},  # seeded from the engine's seed and its id
    )

    @pytest.mark.parametrize("kind", ["hybrid"])
    def test_all_ways_in_one_batch_each_as_if_alone(self, get_driver, get_oracle, kind):
        """Alone, in a batch, in chunks, evicted: the same tokens."""
        alone = get_driver(kind)
        for request_id, way in enumerate(self.WAYS):
            alone.add(request_id, make_prompt(30 + request_id), num_tokens_to_generate=20, **way)
            alone.run()
        batches = {
            "batch": get_driver(kind),
            "chunks": get_driver(kind, max_tokens=16),
            "pressure": get_driver(kind, block_count=14, paused_buffer_size_gb=0),
        }
        for driver in batches.values():
            for request_id, way in enumerate(self.WAYS):
                driver.add(request_id, make_prompt(30 + request_id), num_tokens_to_generate=20, **way)
            driver.run()
            for request_id in range(len(self.WAYS)):
                assert driver.records[request_id].generated_tokens == alone.records[request_id].generated_tokens
        assert batches["pressure"].count(EventType.EVICT) > 0
        for request_id in range(3):  # the greedy ones
            assert_equals_oracle(alone, request_id, get_oracle(kind))

    def test_a_failing_forward_does_not_spend_random_numbers(self, get_driver, monkeypatch):
        """An error in the model, after the draw or in scoring spends no random number: samples are unchanged."""
        params = {"temperature": 1.0, "seed": 8, "num_tokens_to_generate": 6}
        alone = get_driver()
        alone.add(0, make_prompt(20), **params)
        alone.run()
        driver = get_driver()
        driver.add(0, make_prompt(20), **params)
        driver.step()
        with monkeypatch.context() as patch:
            patch.setattr("megatron_ext.runner.step_output.score_rows", fail)
            with pytest.raises(ArithmeticError):
                driver.step()
        driver.run()
        assert driver.records[0].generated_tokens == alone.records[0].generated_tokens


def fail(*_: object, **__: object) -> None:
    raise ArithmeticError("planted")
