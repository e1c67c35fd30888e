"""PY-6: new weights in an engine that runs: what it gives then is what an engine gives that was loaded with them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext import ConfigError, EngineClosed, LoadedEngine, RequestParams
from megatron_ext.config.embedded import EMBEDDED_MODEL_DIR
from megatron_ext.models.native.directory import CONFIG_FILE
from megatron_ext.models.weight_files import WEIGHTS_FILE
from megatron_ext.ops.linear import Packable, onednn
from tests.unit_tests.support.holding import held_steps

SHARED = "The import statement finds a module, loads it and binds its name in the local namespace. "
PROMPTS = [SHARED + end for end in ("When it fails", "Packages are", "When it fails")]
PARAMS = RequestParams(num_tokens_to_generate=10, return_log_probs=True, skip_prompt_log_probs=True)
LONG = RequestParams(num_tokens_to_generate=100, ignore_eos=True)
needs_onednn = pytest.mark.skipif(onednn.problem() is not None, reason=f"{onednn.problem()}")

Outcomes = list[tuple[tuple[int, ...], tuple[float, ...]]]


def outcomes(engine: LoadedEngine) -> Outcomes:
    return [(one.generated_tokens, one.generated_log_probs) for one in engine.generate(PROMPTS, PARAMS)]


def assert_equal(got: Outcomes, want: Outcomes) -> None:
    """TE-1: equal tokens, and log-probs within the bound of docs/requirements.md: batches may be of other sizes."""
    for (tokens, log_probs), (wanted_tokens, wanted_log_probs) in zip(got, want, strict=True):
        assert tokens == wanted_tokens
        assert log_probs == pytest.approx(wanted_log_probs, rel=1e-4, abs=1e-4)


@pytest.fixture(scope="module")
def new() -> dict[str, torch.Tensor]:
    """The embedded model's weights, each a little different."""
    generator = torch.Generator().manual_seed(1)
    weights = load_file(EMBEDDED_MODEL_DIR / WEIGHTS_FILE)
    return {
        name: one.float() * (1 + 0.1 * torch.randn(one.shape, generator=generator)) for name, one in weights.items()
    }


@pytest.fixture
def fresh(new, load, tmp_path) -> LoadedEngine:
    """An engine that was loaded with the new weights."""
    for file in EMBEDDED_MODEL_DIR.iterdir():
        if file.name not in (WEIGHTS_FILE, "README.md") and not file.name.startswith("__"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert (tmp_path / CONFIG_FILE).exists()
    save_file(new, tmp_path / WEIGHTS_FILE)
    return load(load=tmp_path)


def are_packed(engine: LoadedEngine) -> bool:
    return all(layer.packed is not None for layer in engine._loaded.model.modules() if isinstance(layer, Packable))


@pytest.mark.parametrize("backend", ["auto", pytest.param("onednn", marks=needs_onednn)])
def test_equal_to_a_fresh_engine(new, fresh, load, backend):
    """PY-6: tokens and log-probs are those of the new weights; those of the old ones are others."""
    engine = load(operator_backend=backend)
    assert are_packed(engine) is (backend == "onednn")
    old = outcomes(engine)
    engine.update_weights(new)
    want = outcomes(fresh)
    assert_equal(outcomes(engine), want)
    assert are_packed(engine) is (backend == "onednn")
    with pytest.raises(AssertionError):
        assert_equal(old, want)


def test_the_cache_is_emptied(new, load):
    """PY-6: no block computed with the old weights is found."""
    engine = load()
    engine.generate(PROMPTS, PARAMS)
    assert engine.generate(PROMPTS[0], PARAMS)[0].skipped_prefill_token_count > 0
    engine.update_weights(new)
    assert engine.statistics().use.blocks_cached == 0
    assert [one.skipped_prefill_token_count > 0 for one in engine.generate([PROMPTS[0]] * 3, PARAMS)] == [
        False,
        True,
        True,
    ]


def test_refused_whole(new, load):
    """PY-6: the engine goes on with the old weights, and with what it had cached."""
    engine = load()
    old = outcomes(engine)
    with pytest.raises(ConfigError, match=r"^decoder.final_norm.weight has shape \(3,\); the model's has \(192,\)"):
        engine.update_weights(new | {"decoder.final_norm.weight": torch.ones(3)})
    assert engine.generate(PROMPTS[0], PARAMS)[0].skipped_prefill_token_count > 0
    engine.reset_prefix_cache()
    assert_equal(outcomes(engine), old)


def test_while_requests_run(new, fresh, load):
    """PY-6: running requests go on, later requests find none of their blocks, and other requests are not affected."""
    engine = load()
    with ThreadPoolExecutor(1) as threads:
        with held_steps(engine._client, tokens=30):
            running = threads.submit(engine.generate, PROMPTS, LONG)
            while not engine.statistics().running:
                pass
            engine.update_weights(new)
            found = outcomes(engine)
            assert not running.done()
        assert [len(record.generated_tokens) for record in running.result()] == [100] * 3
    assert_equal(found, outcomes(fresh))
    assert_equal(outcomes(engine), outcomes(fresh))


def test_while_it_is_suspended(new, fresh, load):
    """PY-6: weights change during a suspend, as for a trainer that needs the memory in between."""
    engine = load()
    engine.generate(PROMPTS, PARAMS)
    engine.suspend()
    engine.update_weights(new.items())
    engine.resume()
    assert_equal(outcomes(engine), outcomes(fresh))


def test_in_buckets(new, fresh, load):
    """PY-6: a part of the tensors at a time."""
    engine = load()
    names = list(new)
    for first in range(0, len(names), 10):
        engine.update_weights({name: new[name] for name in names[first : first + 10]}, partial=True)
    assert_equal(outcomes(engine), outcomes(fresh))


def test_the_names(new, load):
    engine = load()
    assert engine.weight_shapes() == {name: tuple(one.shape) for name, one in new.items()}
    engine.close()
    with pytest.raises(EngineClosed):
        engine.update_weights(new)
