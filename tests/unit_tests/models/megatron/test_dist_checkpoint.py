"""Our own distributed checkpoints come back as they were, at any layout, and whatever does not fit is named."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor, nn

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.models.build import build_model
from megatron_ext.models.load import load_model, save_model
from megatron_ext.models.megatron import dist_checkpoint
from megatron_ext.models.megatron.directory import DIGEST_FILE
from megatron_ext.models.megatron.dist_checkpoint import _as_saved, save_dist_checkpoint
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.support.saved_models import load_dist_checkpoint
from tests.unit_tests.support.tensor_parallel import as_rank

CPU = torch.device("cpu")
TOKENS = oracle.prompt(40, seed=0, vocab_size=50)
FILES = [".metadata", "__0_0.distcp", "common.pt", "config.json", "metadata.json"]


@pytest.fixture
def saved(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    save_dist_checkpoint(tmp_path / "checkpoint", tiny_model, tiny_config)
    return tmp_path / "checkpoint"


def load(directory: Path) -> nn.Module:
    return load_dist_checkpoint(directory)[0]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def same_state(one: nn.Module, other: nn.Module) -> bool:
    first, second = state(one), state(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_round_trip(saved: Path, tiny_model: nn.Module, tiny_config: ModelConfig) -> None:
    model, config = load_dist_checkpoint(saved)
    assert config == tiny_config
    assert same_state(model, tiny_model)
    assert torch.equal(oracle.our_logits(model, TOKENS), oracle.our_logits(tiny_model, TOKENS))
    assert not model.training
    assert sorted(path.name for path in saved.iterdir()) == FILES
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"], "nothing temporary is left"


EXPERTS = {
    "num_experts": 4,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"untie_embeddings_and_output_weights": True},
        {"position_embedding_type": "learned_absolute"},
        {"normalization": "LayerNorm", "disable_bias_linear": False, "swiglu": True, "squared_relu": False},
        {"hybrid_override_pattern": "*-*", "position_embedding_type": "rope"},
        {"hybrid_override_pattern": "ME*-", **EXPERTS},
        {"spec": ("megatron_ext.mcore.layer_specs", "hybrid_stack_spec"), "norm_epsilon": 1e-6},
    ],
    ids=str,
)
def test_round_trip_of_other_architectures(changes: dict, tiny_config: ModelConfig, tmp_path: Path) -> None:
    config = ModelConfig(**(tiny_config.to_dict() | changes))
    model = build_model(config, device=CPU, seed=3)
    with torch.no_grad():
        for tensor in state(model).values():
            tensor += torch.randn(tensor.shape)  # what is initialised to ones or zeros would not be missed
    save_dist_checkpoint(tmp_path, model, config)
    loaded, loaded_config = load_dist_checkpoint(tmp_path)
    assert loaded_config == config
    assert same_state(loaded, model)


def test_sixteen_bits_keep_the_decays(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> None:
    save_dist_checkpoint(tmp_path, tiny_model, tiny_config, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded, original = state(load(tmp_path)), state(tiny_model)
    for name in ("A_log", "dt_bias", "D"):
        name = f"decoder.layers.0.mixer.{name}"
        assert torch.equal(loaded[name], original[name])
    name = "decoder.layers.0.mixer.in_proj.weight"
    assert torch.equal(loaded[name], original[name].bfloat16().float())
    assert not torch.equal(loaded[name], original[name])


def test_read_in_another_type(saved: Path, tiny_model: nn.Module) -> None:
    loaded = state(load_dist_checkpoint(saved, dtype=torch.bfloat16)[0])
    for name, original in state(tiny_model).items():
        assert torch.equal(loaded[name], original.to(loaded[name].dtype)), name
    assert loaded["decoder.layers.0.mixer.in_proj.weight"].dtype is torch.bfloat16


def test_norms_have_megatrons_keys(saved: Path) -> None:
    """Megatron's own models, made from Transformer Engine specs, find the norms by these keys."""
    keys = {key for key in megatron_lm.read_tensors(saved) if "norm" in key}
    assert keys == {
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.0.mixer.norm.weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.final_norm.weight",
    }


def model_of_rank(config: ModelConfig, index: int, ranks: int) -> nn.Module:
    with as_rank(index, ranks):
        return build_model(config, device=CPU)


def rank_state(model: nn.Module) -> dict:
    with as_rank(model.tp_group.index, model.tp_group.ranks):
        sharded = model.sharded_state_dict()
    return {name: value for name, value in sharded.items() if not isinstance(value, ShardedObject)}


@pytest.mark.parametrize(
    "changes",
    [{}, {"swiglu": True, "squared_relu": False, "untie_embeddings_and_output_weights": True}],
    ids=str,
)
def test_tensor_parallel_layouts(changes: dict, tiny_config: ModelConfig, tmp_path: Path) -> None:
    """A checkpoint of one rank is read by two, written by them, and read by one again: as it was."""
    config = ModelConfig(**(tiny_config.to_dict() | changes))
    whole = build_model(config, device=CPU, seed=4)
    save_dist_checkpoint(tmp_path, whole, config)
    ranks = [model_of_rank(config, index, 2) for index in range(2)]
    loaded = dist_checkpointing.load({str(i): rank_state(model) for i, model in enumerate(ranks)}, str(tmp_path))
    for index, model in enumerate(ranks):
        model.load_state_dict(loaded[str(index)], strict=False)
    assert (
        ranks[0].decoder.layers[0].mixer.in_proj.weight.shape[0] * 2
        == whole.decoder.layers[0].mixer.in_proj.weight.shape[0]
    )
    for path in (*tmp_path.glob("*.distcp"), tmp_path / ".metadata"):
        path.unlink()
    both = {str(index): rank_state(model) for index, model in enumerate(ranks)}
    write_state(both, tmp_path)
    assert same_state(load(tmp_path), whole)


SPOILED = {
    "lacks decoder.layers.0.mixer.D": lambda t: t.pop("decoder.layers.0.mixer.D"),
    "lacks decoder.layers.0.mixer.in_proj.weight.B": lambda t: t.pop("decoder.layers.0.mixer.in_proj.weight.B"),
    "lacks decoder.layers.2.mlp.linear_fc1.layer_norm_weight": lambda t: t.pop(
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight"
    ),
    "has unexpected decoder.layers.2.pre_mlp_layernorm.weight": lambda t: t.update(
        {"decoder.layers.2.pre_mlp_layernorm.weight": torch.ones(32)}
    ),
    "has unexpected output_layer.weight": lambda t: t.update({"output_layer.weight": torch.ones(50, 32)}),
    "lacks decoder.final_norm.weight and has unexpected final_norm.weight": lambda t: t.update(
        {"final_norm.weight": t.pop("decoder.final_norm.weight")}
    ),
    r"decoder.final_norm.weight has shape \(16,\), and the configuration requires \(32,\)": lambda t: t.update(
        {"decoder.final_norm.weight": torch.ones(16)}
    ),
    r"embedding.word_embeddings.weight has shape \(64, 32\), and the configuration requires \(50, 32\)": lambda t: (
        t.update({"embedding.word_embeddings.weight": torch.ones(64, 32)})
    ),
    "mixer.A_log is of type uint8; supported are float32": lambda t: t.update(
        {"decoder.layers.0.mixer.A_log": torch.ones(8, dtype=torch.uint8)}
    ),
}


@pytest.mark.parametrize("message", SPOILED)
def test_weights_that_do_not_fit(message: str, saved: Path) -> None:
    megatron_lm.edit_tensors(saved, SPOILED[message])
    with pytest.raises(CheckpointError, match=message) as caught:
        load(saved)
    assert "\n" not in str(caught.value)


def test_objects_that_are_not_known(saved: Path, tiny_model: nn.Module) -> None:
    objects = {key: ShardedObject(key, 1, (1,), (0,)) for key in ("colour", "decoder.final_norm._extra_state")}
    write_state({**tiny_model.sharded_state_dict(), **objects}, saved)
    with pytest.raises(CheckpointError, match=r"has unexpected colour$"):
        load(saved)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.system, (self.command,)


def damage(write: Callable[[Path], object], name: str) -> Callable[[Path], object]:
    return lambda directory: write(directory / name)


DAMAGES = {
    r"has no \.metadata": damage(Path.unlink, ".metadata"),
    r"\.metadata cannot be read": damage(lambda path: path.write_bytes(path.read_bytes()[:200]), ".metadata"),
    r"common\.pt cannot be read": damage(lambda path: path.write_bytes(b""), "common.pt"),
    r"has no common\.pt": damage(Path.unlink, "common.pt"),
    r"common\.pt does not hold a dictionary": damage(lambda path: torch.save([1], path), "common.pt"),
    r"__0_0\.distcp: No such file": damage(Path.unlink, "__0_0.distcp"),
    r"__0_0\.distcp: tensor .* cannot be read: .* of a file of 5000": damage(
        lambda path: path.write_bytes(path.read_bytes()[:5000]), "__0_0.distcp"
    ),
    r"metadata\.json has backend 'zarr'; only 'torch_dist' is supported": damage(
        lambda path: path.write_text('{"sharded_backend": "zarr"}'), "metadata.json"
    ),
    r"metadata\.json cannot be read": damage(lambda path: path.write_text("{"), "metadata.json"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_files(message: str, saved: Path) -> None:
    DAMAGES[message](saved)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_nothing_in_a_pickle_is_run(name: str, saved: Path, tmp_path: Path) -> None:
    evil = Evil(f"touch {tmp_path / 'run'}")
    if name == "common.pt":
        torch.save({"args": evil}, saved / name)
    else:
        (saved / name).write_bytes(pickle.dumps(evil))
    with pytest.raises(CheckpointError, match=r"it names 'posix\.system'") as caught:
        load(saved)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    pickle.loads(pickle.dumps(evil))
    assert (tmp_path / "run").exists(), "the control: it would have run"


def test_older_checkpoint_is_replaced_whole(saved: Path, tiny_config: ModelConfig) -> None:
    """Its tokenizer and the digest of its weights, too."""
    for file in ("tokenizer.json", DIGEST_FILE):
        (saved / file).write_text("{}")
    other = build_model(tiny_config, device=CPU, seed=8)
    save_dist_checkpoint(saved, other, tiny_config)
    assert same_state(load(saved), other)
    assert sorted(path.name for path in saved.iterdir()) == FILES
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"]


def test_other_directories_are_not_overwritten(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> None:
    """A note beside our files; a directory of Megatron-LM's; one of its iterations."""
    beside, theirs = tmp_path / "beside", tmp_path / "theirs"
    save_dist_checkpoint(beside, tiny_model, tiny_config)
    (beside / "notes.txt").write_text("keep me")
    tensors = megatron_lm.stored_tensors(tiny_model, tiny_config)
    megatron_lm.write(theirs, tensors, megatron_lm.arguments(tiny_config))
    for directory, why in (
        (beside, r"it holds notes\.txt"),
        (theirs, "it holds iter_0000100"),
        (theirs / "iter_0000100", "it is not a checkpoint of ours"),
    ):
        before = sorted(directory.rglob("*"))
        with pytest.raises(ConfigError, match=f"is not overwritten, {why}"):
            save_dist_checkpoint(directory, tiny_model, tiny_config)
        assert sorted(directory.rglob("*")) == before


@pytest.mark.parametrize(
    "error", [OSError("no space left on device"), CheckpointingException("no space left on device")]
)
def test_failed_save_leaves_the_old_checkpoint(
    error: Exception,
    saved: Path,
    tiny_model: nn.Module,
    tiny_config: ModelConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(state: dict, directory: Path) -> None:
        (directory / "__0_0.distcp").write_bytes(b"half")
        raise error

    monkeypatch.setattr(dist_checkpoint, "write_state", fail)
    with pytest.raises(ConfigError, match=r"--save .*no space left on device"):
        save_dist_checkpoint(saved, build_model(tiny_config, device=CPU, seed=8), tiny_config)
    assert same_state(load(saved), tiny_model)
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(("rank", "entries", "rows"), [(0, 4, 4), (1, 4, None), (1, 5, 1), (1, 8, 4)])
def test_padding_rows_of_the_vocabulary_are_not_saved(rank: int, entries: int, rows: int | None) -> None:
    """TE-6: two ranks have four rows each; a rank with padding rows only saves nothing of the table."""
    table = ShardedTensor.from_rank_offsets("table", torch.ones(4, 2), (0, rank, 2), allow_shape_mismatch=True)
    kept = _as_saved("table", table, torch.float32, entries)
    if rows is None:
        assert kept is None
        return
    assert (tuple(kept.data.shape), tuple(kept.global_shape)) == ((rows, 2), (entries, 2))


def test_saved_and_loaded_as_flags_do(saved: Path, tiny_model: nn.Module, tmp_path: Path) -> None:
    """`--load`, `--save`, `--load` of what that wrote."""
    loaded = load_model(SourceConfig(load=str(saved)), {}, device=CPU)
    save_model(tmp_path / "saved", loaded)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == FILES
    again = load_model(SourceConfig(load=str(tmp_path / "saved")), {"max_position_embeddings": 32}, device=CPU)
    assert again.config.max_position_embeddings == 32
    assert same_state(again.model, tiny_model)
    with pytest.raises(ConfigError, match="--vocab-size 49 contradicts"):
        load_model(SourceConfig(load=str(tmp_path / "saved")), {"vocab_size": 49}, device=CPU)
