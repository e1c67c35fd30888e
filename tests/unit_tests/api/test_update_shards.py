"""RL-7: each rank hands over its own shards of new weights; log-probs equal the new model's own forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext import (
    AttachedEngine,
    ConfigError,
    EngineFollower,
    LoadedEngine,
    RequestParams,
    WeightUpdateError,
    attach_engine,
    load_engine,
    load_follower,
)
from megatron_ext.config import ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.models.update import shards
from megatron_ext.models.update.writer import WeightWriter
from tests.unit_tests.api.conftest import ATTACHED
from tests.unit_tests.api.test_attach_ranks import LAYOUTS, RANKS, load
from tests.unit_tests.support import megatron_models as models
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.weights import writer_of

pytestmark = pytest.mark.usefixtures("upstream")

SETTINGS = ATTACHED | {"distributed_timeout_minutes": 2.0}
COUNT = 6
PARAMS = RequestParams(num_tokens_to_generate=COUNT, return_log_probs=True, skip_prompt_log_probs=True)
OLD, NEW = 1, 2  # seeds
EMBEDDING = "embedding.word_embeddings.weight"
Engine = LoadedEngine | EngineFollower
Outcome = tuple[list[int], int, list[float]]


def outcome(engine: Engine) -> Outcome | None:
    """Tokens, skipped tokens and log-probs on the first rank; the others compute them in their next update."""
    if isinstance(engine, EngineFollower):
        return None
    (one,) = engine.generate(models.PROMPT, PARAMS)
    return list(one.generated_tokens), one.skipped_prefill_token_count, list(one.generated_log_probs or ())


def expected(model: nn.Module, skipped: int) -> Outcome:
    tokens, log_probs = models.generate(model, models.PROMPT, COUNT)
    return tokens, skipped, pytest.approx(log_probs, abs=1e-4)


def stored(name: str, seed: int, directory: Path) -> nn.Module:
    """Write a whole model's checkpoint; return the model."""
    model = models.build(name, seed=seed)
    write_state({"model": model.sharded_state_dict(), "args": models.arguments(name)}, directory)
    return model


def opened(way: str, layout: str, directory: str) -> Engine:
    """Return this rank's part of an engine of the model in a checkpoint, a second copy beside the trainer's."""
    name, sizes, fields = LAYOUTS[layout]
    if way == "attached":
        return attach_engine(load(models.build(name, seed=9, **fields), Path(directory)), None, **SETTINGS)
    function = load_follower if dist.is_initialized() and dist.get_rank() else load_engine
    stages = {name: 2 * count for name, count in fields.items()}  # of layers of ours
    return function(load=directory, tokenizer_type="NullTokenizer", **SETTINGS, **sizes, **stages)


def failing_once(rank: int) -> None:
    """Make the next write of a rank fail in its middle."""
    write = WeightWriter._write_local

    def failing(self: WeightWriter, given: dict[str, Tensor]) -> None:
        WeightWriter._write_local = write
        write(self, dict(list(given.items())[: len(given) // 2]))
        if dist.get_rank() == rank:
            raise ZeroDivisionError("planted")

    WeightWriter._write_local = failing


def phases(way: str, layout: str, old: str, new: str) -> dict[str, object]:
    """Outcomes on the first rank, and messages on every one, after each way in which an update can end."""
    name, sizes, fields = LAYOUTS[layout]
    with models.stand_ins():
        platform.initialize(ParallelConfig(**sizes))
        given = load(models.build(name, seed=9, **fields), Path(new)).state_dict()
        engine = opened(way, layout, old)
        seen: dict[str, object] = {"old": outcome(engine)}
        tensors = [name for name, one in given.items() if isinstance(one, Tensor)]
        wrong = tensors[0]
        with pytest.raises(ConfigError) as refused:
            engine.update_weights_from_shards(given | ({wrong: torch.ones(3)} if dist.get_rank() else {}))
        seen |= {"refusal": str(refused.value), "refused": outcome(engine)}
        failing_once(rank=1)
        with pytest.raises(WeightUpdateError) as failed:
            engine.update_weights_from_shards(given)
        seen["failure"] = str(failed.value)
        if not isinstance(engine, EngineFollower):
            with pytest.raises(WeightUpdateError):
                engine.generate(models.PROMPT, PARAMS)
            engine.suspend()  # the others go on until they give their shards
            with pytest.raises(ConfigError, match=r"do not follow while|the attached model"):
                engine.update_weights(given)
        engine.update_weights_from_shards({f"module.{name}": one for name, one in given.items()}, weights_version=5)
        if not isinstance(engine, EngineFollower):
            engine.resume()
        seen["new"] = outcome(engine)
        failing_once(rank=0)
        with pytest.raises(WeightUpdateError, match="the old weights are back"):
            engine.update_weights_from_shards({name: 2 * given[name] for name in tensors}, keep_old=True)
        seen["restored"] = outcome(engine)
        some = [name for name in tensors if "local_experts" in name] or tensors[-1:]  # that all replicas use
        engine.update_weights_from_shards(given | {name: given[name] * (1 + 0.5 * dist.get_rank()) for name in some})
        seen["perturbed"] = outcome(engine)
        if not isinstance(engine, EngineFollower):
            seen["versions"] = engine.weights_version
        engine.close()
        return seen


def of_tensors(directory: str) -> list[str]:
    """Messages on a rank of two for tensors in other layouts, and for other options."""
    with models.stand_ins():
        platform.initialize(ParallelConfig(tensor_model_parallel_size=2))
        trainer = load(models.build("llama", seed=9), Path(directory))
        given = dict(trainer.named_parameters())
        engine = opened("loaded", "gpt, tensor", directory)
        gate = "decoder.layers.0.mlp.linear_fc1.weight"
        whole = torch.ones(models.VOCABULARY, given[EMBEDDING].shape[1])
        messages = []
        for one in ({EMBEDDING: whole}, {"decoder.layers.0.what": torch.ones(1)}):
            with pytest.raises(ConfigError) as refused:
                engine.update_weights_from_shards(given | one)
            messages.append(str(refused.value))
        for options in ({"weights_version": dist.get_rank()}, {"in_flight": "never"}, {"weights_version": -1}):
            with pytest.raises(ConfigError) as refused:
                engine.update_weights_from_shards(given, **options)
            messages.append(str(refused.value))
        with pytest.raises(ConfigError) as refused:
            engine.update_weights_from_shards({gate: given[gate]} if dist.get_rank() else given)
        messages.append(str(refused.value))
        engine.update_weights_from_shards({gate: given[gate]}, partial=True)
        engine.close()
        return messages


@pytest.mark.worlds(smoke=True)
@pytest.mark.parametrize(
    ("way", "layout"),
    [
        ("loaded", "hybrid, tensor"),
        *(
            pytest.param(way, layout, marks=pytest.mark.long)
            for way in ("loaded", "attached")
            for layout in LAYOUTS
            if (way, layout) != ("loaded", "hybrid, tensor")
        ),
    ],
)
def test_shards_of_each_rank(way: str, layout: str, tmp_path: Path) -> None:
    """RL-7: a mistake on one rank changes nothing, a failure stops the engine or is undone, new weights are used."""
    name, _, _ = LAYOUTS[layout]
    old, new = (stored(name, seed, tmp_path / str(seed)) for seed in (OLD, NEW))
    found, *others = run_ranks(phases, RANKS.get(layout, 2), way, layout, *(str(tmp_path / str(s)) for s in (OLD, NEW)))
    assert found["old"] == expected(old, 0)
    assert found["refused"] == expected(old, 32)
    assert found["new"] == expected(new, 0)
    assert found["restored"] == expected(new, 0)
    assert found["perturbed"] != expected(new, 0)
    assert found["versions"] == 6
    for key, start in (("refusal", "rank 1: "), ("failure", "new weights could not be written: rank 1: ZeroDivision")):
        assert {one[key] for one in (found, *others)} == {found[key]}
        assert str(found[key]).startswith(start)


@pytest.mark.worlds
def test_layouts_of_tensors(tmp_path: Path) -> None:
    """RL-7: whole tensors and other names are refused by name with a remedy, on all ranks."""
    stored("llama", OLD, tmp_path)
    first, second = run_ranks(of_tensors, 2, str(tmp_path))
    assert first == second
    for message, part in zip(
        first,
        (
            f"{EMBEDDING} is the whole tensor of shape (56, 32), and this rank has a part of shape (28, 32)",
            "the model has no tensor decoder.layers.0.what",
            "rank 1 gives weights_version=1, and the first rank 0",
            "in_flight 'never'",
            "weights_version -1",
            "rank 1: ",
        ),
        strict=True,
    ):
        assert message.startswith(part)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_one_rank(name: str) -> None:
    """RL-7: the same call on one rank, for an attached model whose trainer has another copy."""
    model, other = models.build(name, seed=OLD), models.build(name, seed=NEW)
    with attach_engine(model, None, **SETTINGS) as engine:
        assert isinstance(engine, AttachedEngine)
        assert outcome(engine) == expected(model, 0)
        with pytest.raises(ConfigError, match="do not tell which they are of"):
            writer_of(engine.weight_writer.loaded.model).write_shards({"a": torch.ones(1)}, shards.ShardOptions())
        engine.update_weights_from_shards(other.named_parameters(), in_flight="finish")
        assert outcome(engine) == expected(other, 0)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
