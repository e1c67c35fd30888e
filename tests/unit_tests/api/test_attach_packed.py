"""SC-12: attached models whose linear layers compute with packed weights, beside the parameters that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import nn

from megatron_ext import AttachedEngine, EngineFollower, RequestParams, SilentWeightChange, attach_engine
from megatron_ext.config import ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.mcore.weight_changes import samples_of
from megatron_ext.ops.linear import Packable, onednn
from tests.unit_tests.api.conftest import ATTACHED
from tests.unit_tests.support import megatron_models as models
from tests.unit_tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("upstream"),
    pytest.mark.skipif(onednn.problem() is not None, reason=f"{onednn.problem()}"),
]

SETTINGS = ATTACHED | {
    "pack_weights": True,
    "operator_backend": "onednn",  # packs all weights; weights of tests are smaller than the table's
}
UNCACHED = {"inference_dynamic_batching_enable_prefix_caching": False}
COUNT = 6
PARAMS = RequestParams(num_tokens_to_generate=COUNT)


@pytest.fixture
def attach() -> Iterator[Callable[..., AttachedEngine]]:
    """A function: `attach_engine` with packed weights and small pools; the engines are closed with the test."""
    with ExitStack() as engines:
        yield lambda model, **settings: engines.enter_context(attach_engine(model, None, **SETTINGS | settings))


def tokens_of(engine: AttachedEngine) -> list[int]:
    (record,) = engine.generate(models.PROMPT, PARAMS)
    return list(record.generated_tokens)


def expected_of(model: nn.Module) -> list[int]:
    """Tokens by the model's own forward."""
    return models.generate(model, models.PROMPT, COUNT)[0]


def layers(engine: AttachedEngine | EngineFollower) -> list[Packable]:
    ours = engine.weight_writer.loaded.model if isinstance(engine, AttachedEngine) else engine._worker._resources._model
    return [one for one in ours.modules() if isinstance(one, Packable)]


def are_packed(engine: AttachedEngine | EngineFollower) -> bool:
    """Return whether all layers are packed; a mixture is an error."""
    (found,) = {layer.packed is not None for layer in layers(engine)}
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "nemotron", "experts", "hybrid", "hybrid, tied, rope"])
def test_tokens_are_the_models_own(attach, name: str) -> None:
    """Cold and on a hit; each layer computes with its packed weight, and the model is left as it was."""
    model = models.build(name)
    expected = expected_of(model)  # a forward may add attributes
    before = models.snapshot(model)
    engine = attach(model)
    assert are_packed(engine)
    assert tokens_of(engine) == tokens_of(engine) == expected
    after = models.snapshot(model)
    assert before["attributes"] == after["attributes"]
    assert all(torch.equal(one, after["tensors"][key]) for key, one in before["tensors"].items())


def test_training_between_requests(attach) -> None:
    """After a step of training tokens equal a fresh engine's that packs nothing."""
    model = models.build("hybrid")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    seen = set()
    for _ in range(3):
        with attach_engine(model, None, **SETTINGS | {"pack_weights": False}) as fresh:
            assert not any(layer.packed for layer in layers(fresh))
            expected = tokens_of(fresh)
        seen.add(tuple(expected))
        with attach_engine(model, None, **SETTINGS) as engine:
            assert tokens_of(engine) == expected
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            expected = expected_of(model)
            seen.add(tuple(expected))
            assert tokens_of(engine) == tokens_of(engine) == expected
            assert are_packed(engine)
    assert len(seen) > 1, "training changed nothing"


@pytest.mark.parametrize("settings", [{}, UNCACHED], ids=["cached", "uncached"])
def test_silent_writes_are_noticed_after_idleness(attach, settings: dict[str, Any]) -> None:
    """Without a cache, too: packed copies depend on the weights. `weights_changed` has them packed again."""
    model = models.build("hybrid")
    engine = attach(model, **settings)
    samples = samples_of(engine.weight_writer.loaded.model)
    assert samples is not None
    seconds = [100.0]
    samples.clock = lambda: seconds[0]
    samples.note_activity()
    old = tokens_of(engine)
    model.decoder.layers[2].mixer.in_proj.weight.data.mul_(-1)
    seconds[0] += 1.5
    with pytest.raises(SilentWeightChange, match=r"^decoder\.layers\.2\.mixer\.in_proj\.weight was changed"):
        tokens_of(engine)
    engine.weights_changed()
    new = expected_of(model)
    assert new != old
    assert tokens_of(engine) == new


def silently_scaled(model: nn.Module) -> list[list[int]]:
    """Tokens of a model whose weights are written without a trace twice, by the model's own forward."""
    found = []
    for scale in (-1.25, 0.8):
        for parameter in model.parameters():
            parameter.data.mul_(scale)
        found.append(expected_of(model))
    return found


def phases(directory: str) -> tuple[list[list[int]], bool]:
    """Tokens after each silent write on the first rank; and whether this rank's layers were packed, and then freed."""
    with models.stand_ins():
        platform.initialize(ParallelConfig(tensor_model_parallel_size=2))
        model = models.build("hybrid", seed=9)
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), directory), strict=False)
        found = []
        with attach_engine(model, None, **SETTINGS, distributed_timeout_minutes=2.0) as engine:
            was_packed = are_packed(engine)
            for scale in (-1.25, 0.8):
                for parameter in model.parameters():
                    parameter.data.mul_(scale)
                dist.barrier()
                if isinstance(engine, EngineFollower):
                    engine.follow()
                    continue
                if engine.inference_engine.is_suspended:
                    engine.resume()
                else:
                    engine.weights_changed()
                found.append(tokens_of(engine))
                engine.suspend()
        return found, was_packed and not any(layer.packed for layer in layers(engine))


@pytest.mark.worlds
def test_several_ranks(tmp_path: Path) -> None:
    """Writes that no counter shows are packed again on each rank, as the first is told, or after a suspension."""
    model = models.build("hybrid")
    write_state({"model": model.sharded_state_dict()}, tmp_path)
    expected = silently_scaled(model)
    assert len({tuple(tokens) for tokens in expected}) == 2, "both writes change tokens"
    assert run_ranks(phases, 2, str(tmp_path)) == [(expected, True), ([], True)]
