"""MF-10: an engine of a model of megatron-core in memory: its tokens, its parameters, and what it leaves alone."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from megatron_ext import (
    AttachedEngine,
    ConfigError,
    EngineClosed,
    RequestParams,
    SilentWeightChange,
    Status,
    attach_engine,
    load_engine,
)
from megatron_ext.config import ParallelConfig
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.mcore.weight_changes import samples_of
from megatron_ext.models.attach.shared_model import share_model
from tests.on_request import long_except
from tests.unit_tests.api.conftest import ATTACHED
from tests.unit_tests.models.megatron import test_delta_net
from tests.unit_tests.support import megatron_models as models

pytestmark = pytest.mark.usefixtures("upstream")

COUNT = 8
PARAMS = RequestParams(num_tokens_to_generate=COUNT)
SCORED = RequestParams(num_tokens_to_generate=COUNT, return_log_probs=True)


@pytest.fixture
def attach() -> Iterator[Callable[..., AttachedEngine]]:
    """A function: `attach_engine` with small pools; the engines are closed with the test."""
    with ExitStack() as engines:
        yield lambda model, tokenizer=None, **settings: engines.enter_context(
            attach_engine(model, tokenizer, **ATTACHED | settings)
        )


class Clock:
    """Clock that a test sets."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def watch(self, engine: AttachedEngine) -> None:
        """Let an engine's samples have this clock."""
        samples = samples_of(engine.weight_writer.loaded.model)
        assert samples is not None
        samples.clock = self
        samples.note_activity()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tokens_of(engine: AttachedEngine, prompt: list[int] = models.PROMPT) -> tuple[list[int], int]:
    """Generated tokens, and the number of skipped tokens."""
    (record,) = engine.generate(prompt, PARAMS)
    assert record.status is Status.COMPLETED, record.error
    return list(record.generated_tokens), record.skipped_prefill_token_count


@pytest.mark.parametrize("name", long_except(list(models.KINDS)[::2], models.KINDS))
def test_tokens_and_log_probs_are_the_models_own(attach, name: str) -> None:
    """Cold, and on a hit, tokens equal those of the model's own forward; log-probs are within the bound."""
    model = models.build(name)
    expected, scores = models.generate(model, models.PROMPT, COUNT)
    assert len(set(expected)) > 2, "a constant output shows little"
    engine = attach(model)
    assert tokens_of(engine) == (expected, 0)
    assert tokens_of(engine) == (expected, 32)
    (record,) = engine.generate(models.PROMPT, SCORED)
    torch.testing.assert_close(list(record.generated_log_probs), scores, atol=models.ATOL, rtol=models.RTOL)


def test_gated_delta_net(attach, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPT whose attention is a gated delta net in some layers, of upstream's own modules."""
    parts = SimpleNamespace(
        in_proj=models.ColumnParallelLinear, out_norm=models.WrappedTorchNorm, out_proj=models.RowParallelLinear
    )
    mixer = SimpleNamespace(submodules=SimpleNamespace(mixer=SimpleNamespace(submodules=parts)))
    monkeypatch.setattr(test_delta_net, "recurrent_layer_spec", lambda _: mixer)
    model = test_delta_net.upstream_model(monkeypatch, test_delta_net.CONFIG)
    model.config.experimental_attention_variant = "gated_delta_net"
    prompt = [token % test_delta_net.CONFIG.vocab_size for token in models.PROMPT]
    expected, scores = models.generate(model, prompt, COUNT)
    (record,) = attach(model, inference_dynamic_batching_block_size=64).generate(prompt, SCORED)
    assert list(record.generated_tokens) == expected
    torch.testing.assert_close(list(record.generated_log_probs), scores, atol=models.ATOL, rtol=models.RTOL)
    model.decoder.layers[0].self_attention.use_qk_l2norm = False
    with pytest.raises(ConfigError, match=r"^decoder\.layers\.0\.self_attention has use_qk_l2norm = False"):
        share_model(model, ParallelConfig())


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_wrapped_models(attach, name: str, optimizer: str) -> None:
    """Upstream's own wrappers: a model in bf16 whose parameters are views of the distributed optimizer's buffer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    model = models.build(name, bf16=True, params_dtype=torch.bfloat16)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=optimizer == "distributed")
    wrapped = DistributedDataParallel(model.config, settings, Float16Module(model.config, model)).eval()
    storages = {one.untyped_storage().data_ptr() for one in model.parameters()}
    assert (len(storages) == 1) == (optimizer == "distributed")
    expected, scores = models.generate(wrapped, models.PROMPT, COUNT)
    (record,) = attach([wrapped]).generate(models.PROMPT, SCORED)
    assert list(record.generated_tokens) == expected
    torch.testing.assert_close(list(record.generated_log_probs), scores, atol=math.log(1.2), rtol=0)


@pytest.mark.parametrize("name", long_except(["llama", "experts", "hybrid, tied, rope"], models.STORED))
def test_tokens_are_those_of_a_loaded_checkpoint(attach, name: str, tmp_path: Path) -> None:
    """`load_engine` generates the same from the model's own checkpoint."""
    model = models.build(name, seed=2)
    write_state({"model": model.sharded_state_dict(), "args": models.arguments(name)}, tmp_path)
    found = tokens_of(attach(model))
    with load_engine(load=str(tmp_path), tokenizer_type="NullTokenizer", **ATTACHED) as loaded:
        assert tokens_of(loaded) == found


@pytest.mark.parametrize("name", ["experts", "hybrid, tied, rope"])
def test_the_model_is_left_as_it_was(attach, name: str) -> None:
    """Leave alone its mode, hooks, gradients, flags and tensors, and the process's random states."""
    model = models.build(name)
    model.train()
    model.decoder.layers[1].eval()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 > 0)
        parameter.grad = torch.ones_like(parameter) if index % 3 > 1 else None
    before = models.snapshot(model), random_states()
    engine = attach(model)
    tokens_of(engine)
    engine.generate(models.PROMPT, RequestParams(num_tokens_to_generate=3, temperature=1.0))
    engine.suspend()
    engine.resume()
    engine.close()
    after = models.snapshot(model), random_states()
    assert_same(before, after)


def random_states() -> dict[str, object]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = get_cuda_rng_tracker().get_states()
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "tracker": states} | {
        "numpy": numpy.random.get_state()[1].tolist()
    }


def assert_same(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


class TestWeights:
    """New weights of the caller's model."""

    @pytest.mark.parametrize("name", ["hybrid"])
    @pytest.mark.parametrize("edit", ["in place", "loaded", "optimizer"])
    def test_edits_are_noticed(self, attach, name: str, edit: str) -> None:
        """After an edit that raises version counters nothing cached before is matched, and tokens are new."""
        model, other = models.build(name), models.build(name, seed=7)
        engine = attach(model)
        old, _ = tokens_of(engine)
        assert tokens_of(engine)[1] == 32
        if edit == "in place":
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
                    parameter.copy_(value)
        elif edit == "loaded":
            model.load_state_dict(other.state_dict())
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
                parameter.grad = parameter.detach() - value.detach()
            optimizer.step()
        new, _ = models.generate(model, models.PROMPT, COUNT)
        assert new != old
        assert tokens_of(engine) == (new, 0)
        assert tokens_of(engine) == (new, 32)

    def test_a_replaced_storage_is_followed(self, attach) -> None:
        """Trainers move parameters to a flat buffer by `parameter.data = view`."""
        model = models.build("llama")
        engine = attach(model)
        flat = torch.randn(sum(one.numel() for one in model.parameters()), generator=torch.Generator().manual_seed(1))
        flat.mul_(0.2)
        start = 0
        for parameter in model.parameters():
            parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        engine.weights_changed()
        new, _ = models.generate(model, models.PROMPT, COUNT)
        assert tokens_of(engine) == (new, 0)

    def test_a_silent_write_that_is_not_told_is_an_error(self, attach, clock) -> None:
        """Before the first request after an idle second; the tensor is named, until `weights_changed`."""
        model = models.build("hybrid")
        engine = attach(model)
        clock.watch(engine)
        tokens_of(engine)
        model.decoder.layers[2].mixer.in_proj.weight.data.mul_(1.25)
        clock.seconds += 1.5
        for _ in range(2):
            with pytest.raises(SilentWeightChange, match=r"^decoder\.layers\.2\.mixer\.in_proj\.weight was changed"):
                tokens_of(engine)
        with pytest.raises(SilentWeightChange):
            asyncio.run(engine.generate_async(models.PROMPT, PARAMS))
        engine.weights_changed()
        new, _ = models.generate(model, models.PROMPT, COUNT)
        assert tokens_of(engine) == (new, 0)

    @pytest.mark.parametrize("change", ["counted", "suspended"])
    def test_changes_that_are_followed_are_no_error(self, attach, clock, change: str) -> None:
        """Edits that counters show, and any between a suspension, which empties the cache, and the resumption."""
        model = models.build("llama")
        engine = attach(model)
        clock.watch(engine)
        tokens_of(engine)
        if change == "counted":
            with torch.no_grad():
                model.decoder.layers[0].mlp.linear_fc1.weight.mul_(1.5)
        else:
            engine.suspend()
            model.decoder.layers[0].mlp.linear_fc1.weight.data.mul_(1.5)
            engine.resume()
        clock.seconds += 2
        new, _ = models.generate(model, models.PROMPT, COUNT)
        assert tokens_of(engine) == (new, 0)
        clock.seconds += 2
        assert tokens_of(engine) == (new, 32)

    def test_they_are_written_in_the_model(self, attach) -> None:
        engine = attach(models.build("llama"))
        with pytest.raises(ConfigError, match=r"^the weights belong to the attached model"):
            engine.update_weights({})


class TestSettings:
    """Settings, tokenizers, and the number of engines."""

    @pytest.mark.parametrize(
        "settings",
        [
            {"load": "somewhere"},
            {"load_hf": "somewhere"},
            {"hidden_size": 64},
            {"bf16": True},
            {"tokenizer_type": "NullTokenizer"},
            {"padded_vocab_size": 128},
        ],
        ids=lambda settings: next(iter(settings)),
    )
    def test_settings_of_a_model_are_refused(self, settings: dict) -> None:
        """Settings that describe a model are refused by name, and the model can still be attached."""
        model = models.build("llama")
        with pytest.raises(ConfigError, match=rf"^{next(iter(settings))} describes a model"):
            attach_engine(model, None, **ATTACHED, **settings)
        attach_engine(model, None, **ATTACHED).close()

    def test_a_second_engine_is_refused(self, attach) -> None:
        """An engine per model, until it is closed."""
        model = models.build("llama")
        first = attach(model)
        with pytest.raises(ConfigError, match=r"^an engine is attached to this model already"):
            attach(model)
        expected = tokens_of(first)
        first.close()
        with pytest.raises(EngineClosed):
            tokens_of(first)
        assert tokens_of(attach(model)) == expected


class TestMemory:
    """Shared parameters and freed pools."""

    def test_a_closed_engine_keeps_nothing(self) -> None:
        """Neither the caller's model nor the engine's own one stays in memory."""
        import gc
        import weakref

        model = models.build("llama")
        engine = attach_engine(model, None, **ATTACHED)
        tokens_of(engine)
        alive = [weakref.ref(one) for one in (model, engine.weight_writer.loaded.model, next(model.parameters()))]
        engine.close()
        del model, engine
        gc.collect()
        assert [one() for one in alive] == [None] * 3
