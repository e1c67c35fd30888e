"""`generate` of MegatronLLM and MegatronAsyncLLM: results, shapes, parameters, threads and event loops."""

from __future__ import annotations

import asyncio

import pytest
import torch
from megatron.core.inference import inference_request as upstream

from megatron_ext.apis import DynamicInferenceRequest, SamplingParams
from megatron_ext.errors import ConfigError, EngineClosed
from tests.unit_tests.apis.conftest import tokenizer
from tests.unit_tests.support.megatron_models import MAX_LENGTH, PROMPT, generate

COUNT = 8


def greedy(**fields) -> SamplingParams:
    params = SamplingParams(top_k=1, num_tokens_to_generate=COUNT)
    params.add_attributes(fields)
    return params


@pytest.fixture(scope="session")
def expected(model) -> list[int]:
    """Tokens after the prompt by the model's own forward."""
    return generate(model, PROMPT, COUNT)[0]


class TestResults:
    def test_tokens_are_the_models(self, start, expected):
        (request,) = start().generate(PROMPT, greedy())
        assert isinstance(request, DynamicInferenceRequest)
        assert isinstance(request, upstream.DynamicInferenceRequest)
        assert request.generated_tokens == expected
        assert request.generated_length == COUNT
        assert request.generated_text == tokenizer().detokenize(expected)
        assert (request.status, request.failed(), request.succeeded()) == (upstream.Status.COMPLETED, False, True)
        assert request.prompt_tokens.tolist() == PROMPT
        assert request.prompt_tokens.dtype == torch.int64
        assert request.prompt == tokenizer().detokenize(PROMPT)

    def test_scores(self, start, model, expected):
        params = greedy(return_log_probs=True, top_n_logprobs=3)
        (request,) = start().generate(PROMPT, params)
        assert request.generated_log_probs == pytest.approx(generate(model, PROMPT, COUNT)[1], abs=1e-4)
        assert len(request.prompt_log_probs) == len(request.prompt_top_n_logprobs) == len(PROMPT) - 1
        best = [max(top, key=top.get) for top in request.generated_top_n_logprobs]
        assert best == [tokenizer().detokenize([token]) for token in expected]

    def test_serialized_and_back(self, start):
        (request,) = start().generate(PROMPT, greedy(return_prompt_tokens=True))
        written = request.serialize()
        assert "event_add_engine" not in written
        read = DynamicInferenceRequest.deserialize(
            {key: list(value) if isinstance(value, tuple) else value for key, value in written.items()}
        )
        assert (read.generated_tokens, read.prompt_tokens.tolist()) == (request.generated_tokens, PROMPT)

    def test_a_prompt_that_is_too_long_fails_alone(self, start, expected):
        long, short = start().generate([[1] * 200, PROMPT], greedy())
        assert (long.status, long.failed(), long.generated_tokens) == (upstream.Status.FAILED, True, [])
        errors = [event.payload for event in long.events if event.type.name == "ERROR_NONTRANSIENT"]
        assert "are 208, and a sequence has at most 128" in str(errors[0])
        assert short.generated_tokens == expected

    def test_megatrons_default_length_is_reduced_to_the_positions(self, start, caplog):
        """MF-1: it is no user's wish; another length above the positions is refused."""
        caplog.set_level("INFO", "megatron_ext")
        with pytest.raises(ConfigError, match=f"3000 is more than the model's {MAX_LENGTH} rotary positions"):
            start(max_sequence_length=3000)
        assert start(max_sequence_length=2560).context.max_sequence_length == MAX_LENGTH
        assert f"is reduced to the model's {MAX_LENGTH}" in caplog.text


class TestStopWords:
    """Megatron's rule: tokens of a stop word are not among the generated ones, unless the text keeps it."""

    def test_left_out(self, start, expected):
        word = tokenizer().detokenize(expected[3:5])
        (request,) = start().generate(PROMPT, greedy(stop_words=[word], return_log_probs=True))
        assert request.generated_tokens == expected[:3]
        assert request.generated_length == len(request.generated_log_probs) == 3
        assert request.generated_text == tokenizer().detokenize(expected[:3])

    @pytest.mark.parametrize("keeps", [False, True])
    def test_the_end_of_a_document_is_kept_only_where_asked_for(self, start, expected, keeps):
        (request,) = start(eod=expected[4]).generate(PROMPT, greedy(detokenize_stop_sequence=keeps))
        assert request.generated_tokens == expected[:5]
        assert request.generated_text == tokenizer().detokenize(expected[: 5 if keeps else 4])


class TestShapes:
    def test_the_sync_class_always_returns_a_list(self, start):
        llm = start()
        text = tokenizer().detokenize(PROMPT)
        for prompts, count in [(PROMPT, 1), (text, 1), ([text, text], 2), ([PROMPT], 1), ([], 0)]:
            assert len(llm.generate(prompts, greedy())) == count

    def test_the_async_class_returns_one_object_for_one_prompt(self, start_async, expected):
        async def ask():
            async with start_async() as llm:
                one = await llm.generate(PROMPT, greedy())
                several = await llm.generate([PROMPT], greedy())
                return one, several, await llm.generate([])

        one, several, none = asyncio.run(ask())
        assert (one.generated_tokens, none) == (expected, [])
        assert [request.generated_tokens for request in several] == [expected]


class TestThreads:
    def test_shutdown_ends_requests_that_wait(self, start_async):
        async def leave() -> None:
            llm = start_async()
            await llm.pause()
            task = asyncio.create_task(llm.generate(PROMPT, greedy()))
            client = llm._runtime._loaded.client
            while not await asyncio.wrap_future(
                client.call(lambda: llm._runtime._loaded.inference_engine.core.output.requests())
            ):
                await asyncio.sleep(0)
            await llm.shutdown()
            with pytest.raises(EngineClosed):
                await task

        asyncio.run(leave())
