"""PY-5, RL-6: levels of a suspend: what is kept or offloaded comes back equal; what is dropped is gone."""

from __future__ import annotations

import pytest
import torch

from megatron_ext import EngineSuspended, LoadedEngine, RequestParams
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.memory.pools import OffloadedPools, _tensors
from megatron_ext.scheduling.request_inputs import RequestInputs
from tests.unit_tests.support.holding import PATIENCE, held_steps

PROMPT = tuple(range(5, 75))
LONG = RequestParams(num_tokens_to_generate=30, ignore_eos=True)
KEPT = pytest.mark.parametrize(("level", "is_kept"), [("keep", True), ("offload", True), ("drop", False)])


def contents(engine: LoadedEngine) -> list[torch.Tensor]:
    """Bytes of the pools, each memory once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _tensors(pools(engine))}
    return [torch.empty(0, dtype=torch.uint8).set_(storage).clone() for storage in found.values()]


def pools(engine: LoadedEngine):
    return engine.inference_engine.context.pools


@pytest.fixture
def small(load):
    """A function: an engine whose pools are small."""
    return lambda **settings: load(
        **(
            {
                "inference_dynamic_batching_block_count": 12,
                "inference_dynamic_batching_prefix_caching_mamba_slots": 4,
                "inference_dynamic_batching_max_requests": 2,
            }
            | settings
        )
    )


@KEPT
def test_requests_in_flight_and_the_cache(small, level, is_kept):
    engine = small()
    (expected,) = engine.generate(PROMPT, LONG)
    engine.reset_prefix_cache()
    request = EngineRequest(RequestInputs(PROMPT, LONG))
    with held_steps(engine.client, tokens=20):
        engine.client.submit([request]).result(PATIENCE)
        while engine._call(lambda: request.request.generated_count) < 20:
            pass
        engine.suspend(level)
        with pytest.raises(EngineSuspended):
            engine.generate(PROMPT)
        engine.resume()
    record = request.record.result(PATIENCE)
    assert record.generated_tokens == expected.generated_tokens
    assert (record.recomputed_token_count == 0) is is_kept
    engine.suspend(level)
    engine.resume()
    (again,) = engine.generate(PROMPT, LONG)
    assert again.generated_tokens == expected.generated_tokens
    assert (again.skipped_prefill_token_count > 0) is is_kept


def test_a_host_without_memory(small, monkeypatch):
    """An offload that fails leaves the pools as they were, and the engine awake."""
    engine = small()
    engine.generate(PROMPT, LONG)
    before, move, calls = engine._call(contents, engine), OffloadedPools._move, iter(range(10))

    def fail_later(self: OffloadedPools, tensor: torch.Tensor) -> None:
        if next(calls) == 2:
            raise RuntimeError("no memory")
        move(self, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadedPools, "_move", fail_later)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.suspend("offload")
    assert all(map(torch.equal, before, engine._call(contents, engine)))
    assert engine.generate(PROMPT, LONG)[0].skipped_prefill_token_count == 64


def test_new_weights_meanwhile(small):
    """EX-4: what was kept is not used with other weights."""
    engine = small()
    engine.generate(PROMPT, LONG)
    engine.suspend("offload")
    engine.weights_changed()
    engine.resume()
    assert engine.generate(PROMPT, LONG)[0].skipped_prefill_token_count == 0
