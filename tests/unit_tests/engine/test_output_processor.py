"""Output processor: log-probs, stop words and texts, and what goes on where an output ended early."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.config.request import ResponseFormat
from megatron_ext.engine.error_isolation import ErrorIsolation
from megatron_ext.engine.input_processor import InputProcessor
from megatron_ext.engine.output_processor import OutputProcessor
from megatron_ext.engine.result import Score, StepResult
from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.text.vocabulary import Vocabulary
from tests.unit_tests.scheduling.builders import make_limits, request_of, step
from tests.unit_tests.support.paper_engine import Paper
from tests.unit_tests.support.simulated_device import WORDS
from tests.unit_tests.support.tokenizers import PieceTokenizer

PROMPT, COUNT = tuple(range(9)), 8


def generate(count: int = COUNT, continued: RequestRecord | None = None, **params: object) -> RequestRecord:
    """Record of `PROMPT` in an engine of its own, or of what continues an earlier record."""
    paper, name = Paper(), 0 if continued is None else 1
    request_params = RequestParams(count, ignore_eos=True, **params)
    paper.engine.add(name, RequestInputs(PROMPT, request_params, continued=continued))
    paper.run()
    return paper.records[name]


def opened(request: Request, scheduler: Scheduler | None = None) -> OutputProcessor:
    """Processor of one request's output, which the scheduler has."""
    scheduler = scheduler or Scheduler(make_limits())
    scheduler.add(request)
    output = OutputProcessor(Vocabulary(PieceTokenizer(WORDS), WORDS), ErrorIsolation("the engine"))
    output.open(request, scheduler, output.matcher_of(request))
    return output


def test_log_probs_end_with_the_stop_word_of_a_run_of_drafts():
    """SP-5: tokens after it are dropped, and so are their scores."""
    request = request_of(0, PROMPT, num_tokens_to_generate=COUNT, return_log_probs=True, stop_words=("<6>",))
    output = opened(request)
    for token in (5, 6, 8):
        request.append(token)
    scores = [Score(-float(i), {}) for i in range(3)]
    chunk = Chunk(request, len(PROMPT) - 1, len(PROMPT) + 2)
    output.take([chunk], StepResult({0: 5}, {0: scores[0]}, {}, {}, {0: (6, 8)}, {0: tuple(scores[1:])}))
    assert list(request.generated_tokens) == [5, 6]
    assert request.output.generated_log_probs == [0.0, -1.0]


def test_blocks_whose_scoring_failed_keep_no_log_probs():
    """RL-10, SE-2: the next request for log-probs computes them."""
    scheduler = Scheduler(make_limits(keeps_log_probs=True), EvictionPolicyName.LRU, b"model")
    scored = {"return_log_probs": True, "skip_prompt_log_probs": False, "num_tokens_to_generate": 0}
    request = request_of(0, PROMPT, **scored)
    output = opened(request, scheduler)
    step(scheduler)
    assert scheduler.cache.kept.run(request.block_hashes, [DataKind.LOG_PROBS]) == 2
    output.take([Chunk(request, 0, len(PROMPT))], StepResult({}, {}, {}, {0: "no memory"}))
    assert request.status is Status.FAILED
    assert scheduler.cache.kept.run(request.block_hashes, [DataKind.LOG_PROBS]) == 0


@pytest.mark.parametrize("keeps", [False, True])
def test_the_token_that_ends_an_output_is_text_where_asked_for(keeps):
    """Megatron's rule: it is left out, unless the request keeps it."""
    tokens = generate().generated_tokens[:4]
    record = generate(stop_token_ids=tokens[-1:], detokenize_stop_sequence=keeps)
    assert record.generated_tokens == tokens
    assert record.generated_text == "".join(f"<{one}>" for one in (tokens if keeps else tokens[:-1]))


# Continued outputs


def test_a_continued_output_is_drawn_with_its_own_seed():
    """RL-11: without a seed of the caller's, too, which then follows from the id of the first request."""
    whole = generate(temperature=0.9)
    assert generate(continued=generate(4, temperature=0.9), temperature=0.9).generated_tokens == whole.generated_tokens


def test_stop_words_of_a_continued_output():
    """RL-11: one may begin before the interruption; those that end before it have been passed."""
    tokens = generate().generated_tokens
    words = [f"<{tokens[1]}>", f"<{tokens[3]}><{tokens[4]}>"]
    record = generate(continued=generate(4), stop_words=words)
    assert (record.generated_tokens, record.stop_word) == (tokens[:5], words[1])


def test_a_continued_output_keeps_its_log_probs():
    """RL-11: they are not computed again."""
    record = dataclasses.replace(generate(4), generated_log_probs=(-1.0, -2.0, -3.0, -4.0))
    params = RequestParams(COUNT, ignore_eos=True, return_log_probs=True, skip_prompt_log_probs=True)
    request = Paper().engine.add(1, RequestInputs(PROMPT, params, continued=record))
    assert request.output.generated_log_probs == [-1.0, -2.0, -3.0, -4.0]


# Input


def test_a_form_that_no_output_can_begin_is_refused_as_it_arrives():
    """SE-10: an error before anything is known of the request."""

    class Never:
        def allowed(self, ends: Sequence[int]) -> bytes:
            raise ValueError("no token can follow")

    paper = Paper()
    settings = dataclasses.replace(paper.engine._intake._settings, matcher=lambda form: Never())
    paper.engine._intake = InputProcessor(settings)
    with pytest.raises(ConfigError, match="response_format: no output can begin: no token can follow"):
        paper.add(0, PROMPT, response_format=ResponseFormat("regex", "a"))
    assert not paper.engine.is_busy


def test_a_checkpoint_lies_within_the_prompt_or_at_its_end():
    """Other requests may go on where the prompt ends."""
    Paper().add(0, PROMPT, cache_checkpoint=(len(PROMPT),))
    with pytest.raises(ConfigError):
        Paper().add(0, PROMPT, cache_checkpoint=(len(PROMPT) + 1,))
