"""Model and engine as one object: counts, memory and the end."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch

from megatron_ext.config import BatchingConfig, CacheConfig, RequestParams
from megatron_ext.config.run import EngineSettings
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.errors import EngineClosed
from megatron_ext.models.engine_args import EngineArgs
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.models.load import LoadedModel
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.models import build_slow_decay
from tests.unit_tests.support.server import TWO_LAYERS, tiny_engine

PARAMS = RequestParams(num_tokens_to_generate=3)


def serve(engine: LLMEngine, length: int = 40) -> None:
    request = EngineRequest(RequestInputs(tuple(make_prompt(length, seed=3)), PARAMS))
    engine.client.submit([request])
    request.record.result()


def test_counts_outlive_the_engine():
    """RU-1: the results of a run are written after its engine has been closed."""
    engine = LLMEngine(tiny_engine())
    serve(engine)
    living, steps = engine.counts()
    engine.close()
    with pytest.raises(EngineClosed):
        engine.reset_prefix_cache()
    statistics, at_the_end = engine.counts()
    assert (statistics.counters, statistics.ended) == (living.counters, 1)
    assert at_the_end == steps
    assert steps.prefill_tokens == 40


@pytest.mark.parametrize(("is_durable", "expected"), [(True, ["read", "digest of weights"]), (False, ["read"])])
def test_the_digest_of_weights_is_a_phase_of_the_start(tmp_path, is_durable, expected):
    """DC-2: it takes long for a large model, and only a cache on disk needs it."""
    model = build_slow_decay(TWO_LAYERS)
    loaded = LoadedModel(model, TWO_LAYERS, NullTokenizer(50), torch.float32, "test", packs_weights=False)
    cache = CacheConfig(prefix_cache_dir=str(tmp_path / "cache") if is_durable else None)
    began: list[str] = []
    settings = EngineSettings(batching=BatchingConfig(block_size=16, block_count=50, max_requests=2), cache=cache)
    args = EngineArgs(settings, None, lambda name: began.append(name) or contextlib.nullcontext(), loaded)
    LLMEngine(args.build_engine()).close()
    assert began == [*expected, "compile", "plan"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_frees_the_pools_once(fails, monkeypatch):
    """PY-5: an error of it is raised after that; a second call does nothing."""
    closed = []
    engine = LLMEngine(tiny_engine(), on_close=lambda: closed.append(True))
    core, blocks = engine.inference_engine.core, weakref.ref(engine.inference_engine.context.allocated.kv)
    if fails:
        monkeypatch.setattr(core, "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        engine.close()
    engine.close()
    assert closed == [True]
    assert blocks() is None


def test_a_reset_aborts_all_requests_and_empties_the_cache():
    """RL-2, EX-4: they end with what they have, and the engine serves others."""
    engine = LLMEngine(tiny_engine())
    serve(engine)
    before, steps = engine.counts()
    assert before.use.blocks_cached > 0
    engine.client.pause()
    requests = [EngineRequest(RequestInputs(tuple(make_prompt(20, seed=one)), PARAMS)) for one in range(2)]
    engine.client.submit(requests).result()
    assert engine.reset() == steps
    assert [one.record.result().status.name for one in requests] == ["ABORTED"] * 2
    assert engine.counts()[0].use.blocks_cached == 0
    engine.client.unpause()
    serve(engine)
    engine.close()
