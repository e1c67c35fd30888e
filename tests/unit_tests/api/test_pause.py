"""PY-5, RL-4: generation is paused and resumed; requests that end early keep their tokens and log-probs."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from megatron_ext import LoadedEngine, RequestParams
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request_inputs import RequestInputs
from tests.unit_tests.support.holding import PATIENCE, held_steps

PROMPT = tuple(range(5, 45))
SCORED = RequestParams(
    num_tokens_to_generate=60,
    ignore_eos=True,
    return_log_probs=True,
    skip_prompt_log_probs=True,
    temperature=1.0,
    seed=3,
)


@pytest.fixture(autouse=True)
def resumed(engine):
    yield
    engine.resume_generation()


def begun(engine: LoadedEngine, params: RequestParams = SCORED) -> EngineRequest:
    """Request that has generated a few tokens when this returns, and is paused."""
    request, has_tokens = EngineRequest(RequestInputs(PROMPT, params), is_streamed=True), threading.Event()
    request.notify = has_tokens.set
    with held_steps(engine.client, tokens=3):
        engine.client.submit([request]).result(PATIENCE)
        while engine._call(lambda: request.request.generated_count) < 3:
            assert has_tokens.wait(PATIENCE)
            has_tokens.clear()
        engine.pause_generation()
    return request


def check_beginning(record: RequestRecord, whole: RequestRecord) -> None:
    """Check that a record has a proper beginning of another one's tokens, with their log-probs."""
    count = len(record.generated_tokens)
    assert 0 < count < len(whole.generated_tokens)
    assert record.generated_tokens == whole.generated_tokens[:count]
    assert record.generated_log_probs == pytest.approx(whole.generated_log_probs[:count], abs=1e-5)
    assert len(record.generated_log_probs) == count
    assert record.generated_text


@pytest.fixture(scope="module")
def whole(engine):
    (record,) = engine.generate(PROMPT, SCORED)
    engine.reset_prefix_cache()
    return record


class TestPause:
    def test_requests_keep_their_memory_and_go_on(self, engine, whole):
        request = begun(engine)
        steps, blocks = engine.inference_engine.core.step_count, engine.statistics().use.blocks_in_use
        assert engine.is_paused
        assert blocks > 0
        engine.client.call(lambda: None).result()  # calls take no step
        assert (engine.inference_engine.core.step_count, engine.statistics().running) == (steps, 1)
        assert not request.record.done()
        engine.resume_generation()
        record = request.record.result(PATIENCE)
        assert not engine.is_paused
        assert (record.generated_tokens, record.status) == (whole.generated_tokens, Status.COMPLETED)
        assert record.recomputed_token_count == 0

    def test_it_ends_by_itself(self, engine, whole, caplog):
        caplog.set_level(logging.WARNING, "megatron_ext")
        request = begun(engine)
        assert engine.client.pausing.max_seconds is None
        engine.pause_generation(max_seconds=0.05)
        record = request.record.result(PATIENCE)  # without a call
        assert record.generated_tokens == whole.generated_tokens
        assert not engine.is_paused
        assert [one.message for one in caplog.records if "resumes by itself" in one.message] == [
            "generation resumes by itself: it was paused for 0.05 s at most"
        ]


class TestStopAllAndKeep:
    def test_records_have_the_tokens_and_log_probs_so_far(self, engine, whole):
        request = begun(engine)
        waiting = EngineRequest(RequestInputs((9, 9), SCORED))
        engine.client.submit([waiting]).result()
        assert engine.pause_generation(mode="abort") == 2
        record = request.record.result(PATIENCE)  # before generation is resumed
        assert engine.is_paused
        assert (record.status, record.finish_reason) == (Status.ABORTED, "abort")
        check_beginning(record, whole)
        assert waiting.record.result(PATIENCE).generated_tokens == ()
        assert engine.statistics().use.blocks_in_use == 0

    async def test_a_stream_ends_with_its_last_part(self, engine, whole):
        stream = engine.stream(PROMPT, SCORED)
        with held_steps(engine.client, tokens=3):
            first = await anext(stream)
            await asyncio.to_thread(engine.pause_generation, mode="abort")
        parts = [first] + [part async for part in stream]
        assert parts[-1].finish_reason == "abort"
        check_beginning(stream.record, whole)
        assert tuple(token for part in parts for token in part.tokens) == stream.record.generated_tokens
        assert "".join(part.text for part in parts) == stream.record.generated_text
