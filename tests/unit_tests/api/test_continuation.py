"""RL-11: a request that ended early is continued: its tokens and log-probs are those of one that was never stopped."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megatron_ext import LoadedEngine, RequestParams, RequestRecord, Status, follow_engine, load_engine
from megatron_ext.config.request import ResponseFormat
from tests.unit_tests.api.conftest import SMALL
from tests.unit_tests.api.test_pause import begun
from tests.unit_tests.support.holding import PATIENCE
from tests.unit_tests.support.ranks import run_ranks

PROMPT = tuple(range(5, 45))
SCORED = {"num_tokens_to_generate": 20, "ignore_eos": True, "return_log_probs": True}
SAMPLED = SCORED | {"temperature": 1.0}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
FORM = ResponseFormat.regex("[a-z]{5}[0-9]{5}(yes|no)")
WISHES = {
    "greedy": SCORED,
    "sampled": SAMPLED | {"seed": 3, "skip_prompt_log_probs": True},
    "sampled without a seed": SAMPLED | {"top_k": 50, "top_n_logprobs": 2},
    "penalties": SAMPLED | PENALTIES | {"seed": 4},
    "bad words and biases": SCORED | {"bad_words": (" the", "."), "logit_bias": {16: 1.5}},
    "minimum": SAMPLED | {"seed": 5, "min_tokens": 12, "stop_token_ids": tuple(range(0, 2000, 2))},
    "grammar": {"num_tokens_to_generate": 20, "temperature": 1.0, "seed": 6, "response_format": FORM},
}


def first(record: RequestRecord, count: int) -> RequestRecord:
    """Return the record as it would be if the request had been aborted after `count` tokens."""
    names = ("generated_log_probs", "generated_top_n_log_probs")
    scores = {name: None if getattr(record, name) is None else getattr(record, name)[:count] for name in names}
    return dataclasses.replace(
        record,
        status=Status.ABORTED,
        finish_reason="abort",
        generated_tokens=record.generated_tokens[:count],
        generated_text="",
        stop_word=None,
        weights_version=((0, count),),
        prefix_weights_version=((0, count),),
        **scores,
    )


def assert_continued(record: RequestRecord, whole: RequestRecord) -> None:
    for name in ("generated_tokens", "generated_text", "finish_reason", "status", "stop_word", "seed", "params"):
        assert getattr(record, name) == getattr(whole, name), name
    for name in ("prompt_log_probs", "generated_log_probs"):
        found, wanted = getattr(record, name), getattr(whole, name)
        assert found == (None if wanted is None else pytest.approx(wanted, abs=1e-4)), name
    for found, wanted in zip(
        record.generated_top_n_log_probs or (), whole.generated_top_n_log_probs or (), strict=True
    ):
        assert found == pytest.approx(wanted, abs=1e-4)
    assert record.weights_version == ((0, len(whole.generated_tokens)),)


@pytest.mark.parametrize("name", WISHES)
def test_tokens_are_those_of_one_request(engine: LoadedEngine, name: str) -> None:
    """RL-11: the seed goes on; penalties, grammars and limits count what was generated before."""
    (whole,) = engine.generate(PROMPT, RequestParams(**WISHES[name]))
    assert whole.status is Status.COMPLETED, whole.error
    counts = [0, 1, len(whole.generated_tokens) // 2, len(whole.generated_tokens) - 1]
    for record in engine.generate([first(whole, count) for count in counts]):
        assert_continued(record, whole)


def test_stop_words_begin_before_the_end(engine: LoadedEngine) -> None:
    """RL-11: a stop word that lies on both sides of the interruption is found, and cut from the text."""
    params = RequestParams(**SCORED | {"skip_prompt_log_probs": True})
    tokens = engine.generate(PROMPT, params)[0].generated_tokens
    word = engine.tokenizer.detokenize(list(tokens[9:11]))
    (whole,) = engine.generate(PROMPT, dataclasses.replace(params, stop_words=(word,)))
    assert whole.finish_reason == "stop"
    (record,) = engine.generate(first(whole, len(whole.generated_tokens) - 1))
    assert_continued(record, whole)


@pytest.mark.parametrize(
    "level", [None, "drop", *(pytest.param(one, marks=pytest.mark.long) for one in ("keep", "offload"))]
)
def test_after_an_abort(engine: LoadedEngine, level: str | None) -> None:
    """RL-11: stopped by a pause, maybe suspended, then continued from what is kept, or by computing it again."""
    params = RequestParams(**SAMPLED | PENALTIES | {"num_tokens_to_generate": 40, "skip_prompt_log_probs": True})
    request = begun(engine, params)
    engine.pause_generation(mode="abort")
    record = request.record.result(PATIENCE)
    if level is not None:
        engine.suspend(level)
        engine.resume()
    engine.resume_generation()
    (continued,) = engine.generate(record)
    assert (continued.skipped_prefill_token_count > 0) == (level != "drop")
    assert len(continued.generated_tokens) == 40 > len(record.generated_tokens)
    (whole,) = engine.generate(first(record, 0))
    assert_continued(continued, whole)
    if level == "drop":
        assert continued.recomputed_token_count == len(record.generated_tokens)
        assert continued.computed_prefill_token_count == len(PROMPT)


def test_versions_and_more_tokens(engine: LoadedEngine) -> None:
    """RL-11: tokens keep the version that made them; a complete record continues with a larger limit; so do streams."""
    params = RequestParams(**SAMPLED | {"seed": 9, "num_tokens_to_generate": 8, "skip_prompt_log_probs": True})
    (record,) = engine.generate(PROMPT, params)
    more = dataclasses.replace(params, num_tokens_to_generate=14)
    (whole,) = engine.generate(PROMPT, more)
    engine.weights_changed(weights_version=7)
    try:

        async def streamed() -> list[int]:
            return [token async for part in engine.stream(record, more) for token in part.tokens]

        (continued,) = engine.generate([record], more)
        assert tuple(asyncio.run(streamed())) == continued.generated_tokens == whole.generated_tokens
    finally:
        engine.weights_changed(weights_version=0)
    assert continued.weights_version == continued.prefix_weights_version == ((0, 8), (7, 6))


def test_drafts(load: Callable[..., LoadedEngine]) -> None:
    """RL-11: with speculation, too."""
    drafts = {"speculative_method": "ngram", "num_speculative_tokens": 3, "speculative_adaptive": False}
    engine = load(speculative_ngram_shortest=1, **drafts)
    (whole,) = engine.generate(PROMPT * 2, RequestParams(**SAMPLED | {"seed": 2}))
    records = engine.generate([first(whole, count) for count in range(1, 20)])
    assert sum(one.draft_token_count - one.accepted_token_count for one in records) > 0
    for record in records:
        assert_continued(record, whole)


def on_two_ranks(_: object) -> object:
    settings = SMALL | {"tensor_model_parallel_size": 2}
    if dist.get_rank():
        return follow_engine(**settings)
    with load_engine(**settings) as engine:
        found = []
        for name in ("penalties", "grammar"):
            (whole,) = engine.generate(PROMPT, RequestParams(**WISHES[name]))
            found.append((whole, engine.generate(first(whole, 5))[0]))
            engine.suspend()
            engine.resume()
            found.append((whole, engine.generate(first(whole, 6))[0]))
        return found


@pytest.mark.worlds(smoke=True)
def test_two_ranks() -> None:
    """RL-11: the other ranks continue the same request."""
    found, _ = run_ranks(on_two_ranks, 2, None)
    for whole, continued in found:
        assert_continued(continued, whole)
