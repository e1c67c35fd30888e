"""SA-3, SA-4: ends of requests: by tokens of their own, by any that ends a document, before the first one."""

from __future__ import annotations

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.config import CacheConfig, RequestParams
from megatron_ext.mcore.inference_request import RequestConversion
from megatron_ext.scheduling.record import Status
from tests.unit_tests.support.driver import Driver, assert_equals_expected, make_prompt
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.oracle import Expected, Oracle
from tests.unit_tests.support.tokenizers import PieceTokenizer

PROMPT = make_prompt(40)


class Ending(PieceTokenizer):
    """Several tokens end a document; they are special."""

    def __init__(self, vocab_size: int, ends: tuple[int, ...]) -> None:
        super().__init__(vocab_size)
        self.eod, self.ends = ends[0], ends

    def detokenize(self, ids, skip_special_tokens: bool = True) -> str:
        return super().detokenize([one for one in ids if not (skip_special_tokens and one in self.ends)])


@pytest.fixture(scope="module")
def model():
    return build_slow_decay(HYBRID)


@pytest.fixture(scope="module")
def free(model) -> tuple[int, ...]:
    return Oracle(model).greedy(PROMPT, 12).tokens


def generate(model, *, ends: tuple[int, ...] = (), **params):
    driver = Driver(model, HYBRID, tokenizer=Ending(HYBRID.vocab_size, ends) if ends else None)
    driver.engine.add_request(0, PROMPT, RequestParams(**{"num_tokens_to_generate": 12} | params))
    driver.engine.add_request(1, make_prompt(9), RequestParams(num_tokens_to_generate=12))
    record = driver.run()[0]
    return record, (record.generated_tokens, record.finish_reason)


def test_any_of_several_ends(model, free):
    """FX-5: the first end token ends the text and is not part of it; ignored, end tokens are ordinary tokens."""
    other = next(token for token in range(97) if token not in free)
    record, outcome = generate(model, ends=(other, free[5], free[3]))
    first = free.index(free[3])
    assert outcome == (free[: first + 1], "stop")
    assert record.generated_text == "".join(f"<{token}>" for token in free[:first])
    assert generate(model, ends=(other, free[5], free[3]), ignore_eos=True)[1] == (free, "length")
    assert generate(model, ends=(free[3], other), termination_id=free[5])[1] == (
        free[: free.index(free[5]) + 1],
        "stop",
    )


def test_all_ends_are_put_off(model, free):
    record, (tokens, _) = generate(model, ends=(free[3], free[1]), min_tokens=6, stop_token_ids=(free[4],))
    assert tokens[0] == free[0]
    assert not {free[1], free[3], free[4]} & set(tokens[:6])
    assert len(tokens) > 6 or record.finish_reason == "length"


@pytest.mark.parametrize("ignores", [False, True])
def test_stop_token_ids(model, free, ignores):
    """Stop token ids also hold where the end of a document is ignored."""
    record, outcome = generate(model, stop_token_ids=(96, free[4]), ignore_eos=ignores)
    at = free.index(free[4])
    assert outcome == (free[: at + 1], "stop")
    assert record.generated_text == "".join(f"<{token}>" for token in free[:at])


def test_megatrons_requests_have_no_token_of_a_stop_word(model, free):
    """As in Megatron, generated tokens end where the text does."""
    word = f"<{free[3]}><{free[4]}>"
    record, _ = generate(model, stop_words=(word,))
    conversion = RequestConversion(PieceTokenizer(HYBRID.vocab_size).detokenize, None, 16, False, torch.device("cpu"))
    assert conversion.convert(record, SamplingParams(stop_words=[word]), 12).generated_tokens == list(free[:3])


class TestNoToken:
    """Prompts that are computed and scored only, without a generated token."""

    def test_scores_are_those_of_a_recompute(self, model):
        """Scores are equal in chunks and beside a neighbour that generates; every prompt token is computed once."""
        driver, oracle = Driver(model, HYBRID, max_tokens=16, max_requests=4), Oracle(model)
        driver.add(0, PROMPT, num_tokens_to_generate=0)
        driver.add(1, make_prompt(20), num_tokens_to_generate=6)
        record = driver.run()[0]
        assert (record.status, record.finish_reason, record.generated_tokens) == (Status.COMPLETED, "length", ())
        assert (record.generated_text, record.ttft) == ("", None)
        assert record.computed_prefill_token_count == len(PROMPT)
        expected = Expected((), torch.empty(0, HYBRID.vocab_size), oracle.prompt_log_probs(PROMPT))
        torch.testing.assert_close(
            torch.tensor(record.prompt_log_probs), expected.prompt_log_probs, atol=1e-4, rtol=1e-4
        )
        assert_equals_expected(driver, 1, oracle.greedy(make_prompt(20), 6))

    def test_it_leaves_its_blocks_in_the_cache(self, model):
        driver = Driver(model, HYBRID, cache=CacheConfig(snapshot_slots=8))
        driver.add(0, PROMPT, num_tokens_to_generate=0, return_log_probs=False)
        driver.run()
        driver.add(1, PROMPT, num_tokens_to_generate=4, skip_prompt_log_probs=True)
        records = driver.run()
        assert records[1].skipped_prefill_token_count == 32
        assert_equals_expected(driver, 1, Oracle(model).greedy(PROMPT, 4))
