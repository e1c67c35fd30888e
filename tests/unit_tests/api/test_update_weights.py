"""PY-6: new weights in a running engine: its outputs equal the outputs of an engine that was loaded with them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_ext import (
    ConfigError,
    LoadedEngine,
    RequestParams,
    WeightUpdateError,
    load_engine,
)
from megatron_ext.models.update import writer
from megatron_ext.ops.linear import Packable, onednn
from megatron_ext.scheduling.record import Status
from tests.unit_tests.api.conftest import SMALL
from tests.unit_tests.support.holding import held_steps
from tests.unit_tests.support.new_weights import new_weights, write_checkpoint

SHARED = "The import statement finds a module, loads it and binds its name in the local namespace. "
PROMPTS = [SHARED + end for end in ("When it fails", "Packages are", "When it fails")]
PARAMS = RequestParams(num_tokens_to_generate=10, return_log_probs=True, skip_prompt_log_probs=True)
LONG = RequestParams(num_tokens_to_generate=40, ignore_eos=True)
needs_onednn = pytest.mark.skipif(onednn.problem() is not None, reason=f"{onednn.problem()}")

Outcomes = list[tuple[tuple[int, ...], tuple[float, ...]]]


def outcomes(engine: LoadedEngine) -> Outcomes:
    return [(one.generated_tokens, one.generated_log_probs) for one in engine.generate(PROMPTS, PARAMS)]


def assert_equal(got: Outcomes, want: Outcomes) -> None:
    """TE-1: equal tokens, and log-probs within the bound of tests/requirements.md: batches may be of other sizes."""
    for (tokens, log_probs), (wanted_tokens, wanted_log_probs) in zip(got, want, strict=True):
        assert tokens == wanted_tokens
        assert log_probs == pytest.approx(wanted_log_probs, rel=1e-4, abs=1e-4)


@pytest.fixture(scope="module")
def new() -> dict[str, torch.Tensor]:
    """The embedded model's weights, each a little different."""
    return new_weights()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Outcomes:
    """Outcomes of an engine that was loaded with the new weights."""
    directory = tmp_path_factory.mktemp("new")
    write_checkpoint(directory)
    with load_engine(**SMALL, load_hf=directory) as engine:
        return outcomes(engine)


def are_packed(engine: LoadedEngine) -> bool:
    return all(
        layer.packed is not None for layer in engine.weight_writer.loaded.model.modules() if isinstance(layer, Packable)
    )


@pytest.mark.parametrize("backend", ["auto", pytest.param("onednn", marks=needs_onednn)])
def test_equal_to_a_fresh_engine(new, fresh, load, backend):
    """PY-6: tokens and log-probs equal a fresh engine's with the new weights, and differ from the old ones."""
    engine = load(operator_backend=backend)
    assert are_packed(engine) is (backend == "onednn")
    old = outcomes(engine)
    engine.update_weights(new)
    assert_equal(outcomes(engine), fresh)
    assert are_packed(engine) is (backend == "onednn")
    with pytest.raises(AssertionError):
        assert_equal(old, fresh)


def test_refused_whole(new, load):
    """PY-6: the engine goes on with the old weights and its cached entries."""
    engine = load()
    old = outcomes(engine)
    with pytest.raises(ConfigError, match=r"^decoder.final_norm.weight has shape \(3,\); the model's has \(192,\)"):
        engine.update_weights(new | {"decoder.final_norm.weight": torch.ones(3)})
    assert engine.generate(PROMPTS[0], PARAMS)[0].skipped_prefill_token_count > 0
    engine.reset_prefix_cache()
    assert_equal(outcomes(engine), old)


@pytest.mark.parametrize("in_flight", ["recompute", "continue"])
def test_while_requests_run(new, fresh, load, in_flight):
    """PY-6, RL-2: running requests go on, later requests find none of their blocks; each token has its version."""
    engine = load()
    with ThreadPoolExecutor(1) as threads:
        with held_steps(engine.client, tokens=10):
            running = threads.submit(engine.generate, PROMPTS, LONG)
            while not engine.statistics().running:
                pass
            engine.update_weights(new, in_flight=in_flight)
            found = outcomes(engine)
            assert not running.done()
        records = running.result()
    assert [len(record.generated_tokens) for record in records] == [40] * 3
    for record in records:
        (first, before), (second, after) = record.weights_version
        assert (first, second, before + after) == (0, 1, 40)
        assert (record.prefix_weights_version == ((0, 40),)) is (in_flight == "continue")
    assert_equal(found, fresh)
    assert_equal(outcomes(engine), fresh)


def test_requests_finish_first(new, fresh, load):
    """RL-3: the update waits for earlier requests; requests that arrive meanwhile wait for the new weights."""
    engine = load()
    with ThreadPoolExecutor(3) as threads:
        with held_steps(engine.client, tokens=5):
            running = threads.submit(engine.generate, PROMPTS, LONG)
            while not engine.statistics().running:
                pass
            update = threads.submit(engine.update_weights, new, in_flight="finish", weights_version=9)
            while not engine.client._idle_calls:
                pass
            late = threads.submit(outcomes, engine)
            while not engine.client._held and engine.statistics().running + engine.statistics().waiting <= 3:
                pass
            assert engine.client._held
            assert not update.done()
        assert [record.weights_version for record in running.result()] == [((0, 40),)] * 3
        update.result()
        assert_equal(late.result(), fresh)
    assert engine.weights_version == 9
    engine.update_weights(new, in_flight="finish")  # none is in flight
    with pytest.raises(ConfigError, match="must be one of recompute, abort, continue; the weights are written already"):
        engine.weights_changed(in_flight="finish")
    assert engine.weights_version == 10


def test_requests_are_aborted(new, load):
    """RL-3: they end with their tokens and log-probs; a refused update ends none."""
    engine = load()
    params = RequestParams(num_tokens_to_generate=40, ignore_eos=True, return_log_probs=True)
    with ThreadPoolExecutor(1) as threads:
        with held_steps(engine.client, tokens=5):
            running = threads.submit(engine.generate, PROMPTS[:2], params)
            while not engine.statistics().running:
                pass
            with pytest.raises(ConfigError, match="are missing"):
                engine.update_weights({"decoder.final_norm.weight": torch.ones(192)}, in_flight="abort")
            assert engine.statistics().running
            engine.update_weights(new, in_flight="abort")
            assert not engine.statistics().running
        for record in running.result():
            assert record.status is Status.ABORTED
            assert 0 < len(record.generated_tokens) == len(record.generated_log_probs) < 40
            assert record.weights_version == ((0, len(record.generated_tokens)),)


@pytest.mark.parametrize("keep_old", [False, True])
def test_a_write_that_fails(new, fresh, load, monkeypatch, keep_old):
    """RL-1: requests end and none is taken until all weights are written, unless the old ones are back."""
    engine = load()
    old = outcomes(engine)
    find, calls = writer.writable_tensors, iter(range(10))

    def find_and_fail(model, names):
        found = find(model, names)
        if next(calls) == 0:
            found |= {list(found)[-1]: torch.ones(1, 2, 3, 5)}  # which no weight can be copied to
        return found

    monkeypatch.setattr(writer, "writable_tensors", find_and_fail)
    with ThreadPoolExecutor(1) as threads:
        with held_steps(engine.client, tokens=5):
            running = threads.submit(engine.generate, PROMPTS, LONG)
            while not engine.statistics().running:
                pass
            with pytest.raises(WeightUpdateError, match="the old weights are back" if keep_old else "write all"):
                engine.update_weights(new, keep_old=keep_old)
            assert keep_old or engine.statistics().use.blocks_cached == 0
        records = running.result()
    if keep_old:
        assert [record.status for record in records] == [Status.COMPLETED] * 3
        assert_equal(outcomes(engine), old)
        assert engine.weights_version == 0
        return
    assert [record.status for record in records] == [Status.FAILED] * 3
    assert all(record.is_fault and record.generated_tokens for record in records)
    name = "decoder.final_norm.weight"
    for refused in (lambda: None, lambda: engine.update_weights({name: new[name]}, partial=True)):
        refused()
        with pytest.raises(WeightUpdateError):
            engine.generate(PROMPTS, PARAMS)
    engine.update_weights(new)
    assert_equal(outcomes(engine), fresh)


def test_a_version_that_no_reader_of_json_keeps_is_refused(load):
    """RL-2: before anything is written; the next number would be one that clients cannot send."""
    engine = load()
    for update in (engine.weights_changed, lambda **settings: engine.update_weights({}, **settings)):
        with pytest.raises(ConfigError, match=r"weights_version .* must be an integer from 0 to 9007199254740991"):
            update(weights_version=2**53)
    assert engine.weights_version == 0


def test_while_it_is_suspended(new, fresh, load):
    """PY-6: weights change during a suspend, as for a trainer that needs the memory in between."""
    engine = load()
    engine.generate(PROMPTS, PARAMS)
    engine.suspend()
    engine.update_weights(new.items())
    engine.resume()
    assert_equal(outcomes(engine), fresh)
