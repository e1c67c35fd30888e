"""PY-3: prompts in, records out, in order; and what becomes of an engine around that."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ext import (
    ConfigError,
    EngineClosed,
    RequestParams,
    Status,
    load_engine,
)
from megatron_ext.config import SourceConfig
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import load_model
from tests.unit_tests.api.conftest import SMALL
from tests.unit_tests.support.holding import PATIENCE, held_steps

SHARED = "The import statement finds a module, loads it and binds its name in the local namespace. "
PROMPTS = [SHARED + "When it fails", "A list is", [5, 6, 7, 8], SHARED + "Packages are"]
GREEDY = RequestParams(num_tokens_to_generate=12)


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """The tokens of an engine without any of what is tested here."""
    loaded = load_model(SourceConfig(), {})
    from megatron_ext.config import BatchingConfig, CacheConfig

    batching = BatchingConfig(block_size=16, block_count=200, max_requests=16)
    bare = build_engine(
        loaded.model, loaded.config, loaded.tokenizer, batching, CacheConfig(snapshot_slots=32), dtype=loaded.dtype
    )
    return [record.generated_tokens for record in bare.generate(PROMPTS, GREEDY)]


def test_records_in_order(engine, expected):
    """PY-3: a list of prompts, each as itself, and the record says what it was."""
    records = engine.generate(PROMPTS, GREEDY)
    assert [record.generated_tokens for record in records] == expected
    assert [record.prompt_text for record in records] == [PROMPTS[0], PROMPTS[1], None, PROMPTS[3]]
    assert {record.status for record in records} == {Status.COMPLETED}
    assert records[3].skipped_prefill_token_count > 0  # after the first prompt's beginning


def test_all_or_none(engine):
    """PY-3: one invalid prompt, and no prompt of the call is served."""
    before = engine.statistics()
    with pytest.raises(ConfigError, match=r"^prompt 1: it is empty"):
        engine.generate(["A list is", ""])
    assert engine.statistics() == before


def test_an_unservable_prompt_fails_alone(engine):
    """PY-3: the request fails alone with its reason, as on the command line."""
    longest = engine.model_config.max_position_embeddings
    good, bad = engine.generate(["A list is", [5] * longest], GREEDY)
    assert (good.status, bad.status) == (Status.COMPLETED, Status.FAILED)
    assert "cannot be served" in bad.error


def test_an_interrupted_call_aborts(engine, monkeypatch):
    """PY-5: Ctrl-C in `generate` leaves no request in the engine."""
    requests = []

    class Interrupted:
        def result(self):
            raise KeyboardInterrupt

    def submit(pending):
        requests.extend(pending)
        original(pending).result()
        return Interrupted()

    original = engine.client.submit
    monkeypatch.setattr(engine.client, "submit", submit)
    with held_steps(engine.client), pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, RequestParams(num_tokens_to_generate=50, ignore_eos=True))
    statistics = engine.statistics()
    assert (statistics.running, statistics.waiting, statistics.use.blocks_in_use) == (0, 0, 0)
    assert [request.record.result(PATIENCE).status for request in requests] == [Status.ABORTED] * 4


class TestClosed:
    """PY-5: the end of an engine."""

    def test_everything_ends(self):
        with load_engine(**SMALL) as engine:
            with ThreadPoolExecutor(1) as threads, held_steps(engine.client):
                waiting = threads.submit(
                    engine.generate, PROMPTS, RequestParams(num_tokens_to_generate=50, ignore_eos=True)
                )
                while not engine.statistics().running:
                    pass
                engine.close()
                with pytest.raises(EngineClosed, match=r"^the engine was closed before this request had ended"):
                    waiting.result(PATIENCE)
            engine.close()  # once more does nothing
            assert not [one for one in threading.enumerate() if one.name.startswith("engine") and one in _of(engine)]
            for call in (engine.statistics, engine.suspend, lambda: engine.generate("A list is")):
                with pytest.raises(EngineClosed, match=r"^the engine is closed; load a new one"):
                    call()


def _of(engine) -> set[threading.Thread]:
    return engine.client._thread._calls._threads
