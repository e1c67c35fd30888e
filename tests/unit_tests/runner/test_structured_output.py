"""SA-5, SA-2, SE-10: answers that must have a form have it whenever they end by themselves, whatever their life is."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence

import jsonschema
import pytest

from megatron_ext.config import BatchingConfig, CacheConfig, RequestParams, SourceConfig
from megatron_ext.config.speculation import NO_SPECULATION, SpeculationConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.text.grammars import Matcher
from tests.on_request import long_except
from tests.unit_tests.support.drafters import Knowing, right_for_a_while
from tests.unit_tests.support.schemas import random_schema

PROMPT = "The function json.loads takes a text and gives an object."
PATIENCE = 60.0  # seconds until a test gives up; nothing is measured
SCHEMAS = [random_schema(seed) for seed in range(24)]
NEIGHBOUR = RequestParams(num_tokens_to_generate=24, temperature=0.7, seed=1)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    platform.initialize()
    return load_model(SourceConfig(), {})


def engine_of(loaded: LoadedModel, drafter: object | None = None, **batching: object):
    settings = BatchingConfig(**({"block_size": 16, "block_count": 1200, "max_requests": 64} | batching))
    cache = CacheConfig(snapshot_slots=8)
    speculation = SpeculationConfig("ngram", 5, speculative_adaptive=False) if drafter else NO_SPECULATION
    drafts = {"drafter": drafter, "speculation": speculation}
    return build_engine(loaded.model, loaded.config, loaded.tokenizer, settings, cache, dtype=loaded.dtype, **drafts)


def row_metadata(seed: int, count: int = 96) -> RequestParams:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMAS[seed]}}
    temperature = 1.0 if seed % 2 else 0.0
    return RequestParams(
        num_tokens_to_generate=count, temperature=temperature, seed=seed, response_format=form, return_log_probs=True
    )


@pytest.fixture(scope="module")
def answers(loaded):
    """Answers to random schemas, 12 at once, beside a neighbour with free text."""
    return run_all(engine_of(loaded, max_requests=12))


def run_all(engine):
    futures = [engine.add_request(seed, PROMPT, row_metadata(seed)) for seed in range(len(SCHEMAS))]
    free = engine.add_request(1000, PROMPT, NEIGHBOUR)
    while engine.has_unfinished_requests():
        engine.step_modern()
    return [future.result() for future in futures], free.result()


def test_complete_outputs_validate(answers):
    records, _ = answers
    stopped = [record for record in records if record.finish_reason == "stop"]
    assert all(record.status is Status.COMPLETED for record in records)
    assert len(stopped) >= 0.7 * len(SCHEMAS)
    for record in stopped:
        schema = SCHEMAS[record.request_id]
        validator = jsonschema.Draft202012Validator
        validator.check_schema(schema)
        validator(schema).validate(json.loads(record.generated_text))
        assert record.generated_text.strip() == record.generated_text


LIVES = {
    "alone": {"max_requests": 1},
    "two by two, in chunks": {"max_requests": 2, "max_tokens": 5},
    "preempted": {"block_count": 8, "paused_buffer_size_gb": 0, "max_requests": 6},
}
SOME = (2, 11, 17)


@pytest.mark.parametrize("life", long_except(["preempted", "suspended"], [*LIVES, "suspended"]))
def test_the_same_request_in_any_batch(answers, loaded, life):
    engine = engine_of(loaded, **LIVES.get(life, {}))
    futures = [engine.add_request(seed, PROMPT, row_metadata(seed)) for seed in SOME]
    steps = 0
    while engine.has_unfinished_requests():
        engine.step_modern()
        steps += 1
        if life == "suspended" and steps % 10 == 0:
            engine.suspend()
            engine.resume()
    records = [future.result() for future in futures]
    assert [one.generated_tokens for one in records] == [answers[0][seed].generated_tokens for seed in SOME]
    evicted = any(event.type is EventType.EVICT for one in records for event in one.events)
    assert evicted == (life == "preempted")


def test_with_drafts(answers, loaded):
    """SP-3, SE-10: drafts that have the form and drafts that have not; each row has the mask after its own drafts.

    Drafts that the grammar rules out are not verified; others are rejected by what is drawn.
    """
    drafter = Knowing(right_for_a_while)
    drafter.truth = {i: (*answers[0][i].prompt_tokens, *answers[0][i].generated_tokens) for i in SOME}
    engine = engine_of(loaded, drafter)
    futures = [engine.add_request(seed, PROMPT, row_metadata(seed)) for seed in SOME]
    while engine.has_unfinished_requests():
        engine.step_modern()
    for seed, future in zip(SOME, futures, strict=True):
        record, expected = future.result(), answers[0][seed]
        assert record.generated_tokens == expected.generated_tokens
        assert record.finish_reason == expected.finish_reason
        assert record.generated_log_probs == pytest.approx(expected.generated_log_probs, abs=1e-3)
    assert engine.core.scheduler.counters.accepted > 30
    assert engine.core.scheduler.counters.drafted > engine.core.scheduler.counters.accepted, "no draft was rejected"


def test_by_programs(loaded, answers):
    """CU-5, SA-5: masks in fixed places give the answers of plain steps, beside one that may say anything."""
    engine = engine_of(loaded, max_requests=4, cuda_graph_impl="local", num_cuda_graphs=1)
    fixed, guided = engine.context.cuda_graph_runner, []
    sample = fixed.sample
    fixed.sample = lambda *step: (guided.append(step[-1].has_mask), sample(*step))[1]
    futures = [engine.add_request(seed, PROMPT, row_metadata(seed, 40)) for seed in SOME]
    free = engine.add_request(1000, PROMPT, NEIGHBOUR)
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert sum(guided) > 20
    for future, seed in zip(futures, SOME, strict=True):
        assert future.result().generated_tokens == answers[0][seed].generated_tokens[:40]
    assert free.result().generated_tokens == answers[1].generated_tokens


class HeldMasks:
    """A mask thread that stops before one of its masks until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, masks_before: int) -> None:
        self.released, self.is_holding = threading.Event(), threading.Event()
        self._left = masks_before
        allowed = Matcher.allowed

        def held(matcher: Matcher, ends: Sequence[int]) -> bytes:
            if threading.current_thread().name.startswith("masks"):
                self._left -= 1
                if self._left < 0:
                    self.is_holding.set()
                    assert self.released.wait(PATIENCE), "the test has ended"
            return allowed(matcher, ends)

        monkeypatch.setattr(Matcher, "allowed", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldMasks]:
    held = HeldMasks(monkeypatch, masks_before=4)
    yield held
    held.released.set()


WAYS = {"plain": {}, "programs": {"max_requests": 4, "cuda_graph_impl": "local", "num_cuda_graphs": 1}, "drafts": {}}


@pytest.mark.parametrize("way", long_except(["drafts"], WAYS))
def test_a_mask_that_is_not_ready_delays_its_own_request_only(loaded, answers, held, way):
    """SE-10: another request gets all its tokens meanwhile; then the output is the one without the delay."""
    drafter = Knowing(right_for_a_while) if way == "drafts" else None
    seed = SOME[0]
    expected = answers[0][seed]
    engine = engine_of(loaded, drafter, **WAYS[way])
    if drafter is not None:
        drafter.truth = {seed: (*expected.prompt_tokens, *expected.generated_tokens)}
    future = engine.add_request(seed, PROMPT, row_metadata(seed))
    free = engine.add_request(1000, PROMPT, NEIGHBOUR)
    while not (free.done() and held.is_holding.is_set()):  # a late mask thread gets its jobs from steps
        engine.step_modern()
    engine.step_modern()
    assert not future.done()
    request = engine.get_request(seed)
    assert request.lacks_mask
    assert 0 < request.generated_count < len(expected.generated_tokens)
    assert free.result().generated_tokens == answers[1].generated_tokens
    engine.core.check()
    held.released.set()
    while engine.has_unfinished_requests():
        engine.step_modern()
    record = future.result()
    assert record.generated_tokens == expected.generated_tokens
    assert record.finish_reason == expected.finish_reason
    assert record.generated_log_probs == pytest.approx(expected.generated_log_probs, abs=1e-3)
    assert drafter is None or record.accepted_token_count > 0


@pytest.mark.parametrize("end", long_except(["suspend"], ["abort", "suspend", "cancel"]))
def test_a_request_that_ends_while_its_mask_is_computed_frees_everything(loaded, answers, held, end):
    """SE-10: blocks and slots are free at once; a request that is suspended goes on when its mask is there."""
    engine, seed = engine_of(loaded), SOME[0]
    future = engine.add_request(seed, PROMPT, row_metadata(seed))
    while not held.is_holding.is_set():
        engine.step_modern()
    scheduler = engine.core.scheduler
    if end == "abort":
        engine.abort_request(seed)
        engine.step_modern()
        assert future.result().status is Status.ABORTED
    elif end == "suspend":
        engine.suspend()
        engine.resume()
        engine.step_modern()
        assert engine.get_request(seed).lacks_mask
    else:
        engine.reset()
        assert future.cancelled()
    if end != "cancel":
        engine.core.check()
        assert scheduler.cache.available_count == scheduler.limits.total_blocks
        assert scheduler.running_slots.free_count == scheduler.limits.max_requests
    held.released.set()
    again = future if end == "suspend" else engine.add_request(seed, PROMPT, row_metadata(seed))
    while engine.has_unfinished_requests():
        engine.step_modern()
    assert again.result().generated_tokens == answers[0][seed].generated_tokens


def test_a_fault_in_the_mask_thread_ends_its_request_alone(loaded, monkeypatch, caplog):
    """SE-10: even an undocumented error of the library only refuses the request, and the fault is logged."""

    class Panic(BaseException):
        """Exception like a library's panic."""

    take = Matcher.take

    def failing(self, tokens):
        if len(tokens):
            raise Panic("planted")
        take(self, tokens)

    monkeypatch.setattr(Matcher, "take", failing)
    engine = engine_of(loaded)
    failed, free = engine.add_request(0, PROMPT, row_metadata(4)), engine.add_request(1, PROMPT, NEIGHBOUR)
    while engine.has_unfinished_requests():
        engine.step_modern()
    record = failed.result()
    assert (record.status, record.is_fault) == (Status.FAILED, False)
    assert "planted" in record.error
    assert len(record.generated_tokens) == 1
    assert free.result().status is Status.COMPLETED
    assert "the grammar of request 0" in caplog.text
