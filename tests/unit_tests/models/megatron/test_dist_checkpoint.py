"""Our own distributed checkpoints come back as they were, at any layout, and whatever does not fit is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.build import build_model
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron import dist_checkpoint
from megatron_ext.models.megatron.directory import read_header
from megatron_ext.models.megatron.dist_checkpoint import _as_saved, save_dist_checkpoint
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.support.saved_models import load_dist_checkpoint

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


SPOILED = {
    "lacks decoder.layers.0.mixer.D": lambda t: t.pop("decoder.layers.0.mixer.D"),
    "lacks decoder.layers.0.mixer.in_proj.weight.B": lambda t: t.pop("decoder.layers.0.mixer.in_proj.weight.B"),
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


def test_older_checkpoint_is_replaced_whole(saved: Path, tiny_config: ModelConfig) -> None:
    """Its tokenizer, too."""
    (saved / "tokenizer.json").write_text("{}")
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


# The header, and the place that is saved to


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"hidden_size": 32, "colour": "red"}}, "unknown model field colour"),
        ({"model": {"hidden_size": "32"}}, "hidden_size = '32'; it must be of type int"),
        ({"model": {"swiglu": 1}}, "swiglu = 1; it must be of type bool"),
        ({"model": {"spec": ["one"]}}, r"spec = \['one'\]"),
        ({"model": {"hidden_size": 0}}, r"config\.json: .*0 must be positive"),
        ({"model": None}, "has no model configuration"),
        ({"colour": "red"}, "unknown field colour"),
        ({"format": "other"}, "not of format 'megatron_ext' but 'other'"),
        ({"format": None, "model_type": "nemotron_h"}, "Hugging Face checkpoint, try --load-hf"),
        ({"format_version": 2}, "format version 2; this package reads version 1"),
        ({"format_version": 0}, "format version 0; this package reads version 1"),
        ({"format_version": None}, "format version None; this package reads version 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configurations_that_do_not_fit(changes: dict, message: str, saved: Path) -> None:
    oracle.edit_config(saved, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(saved)
    assert "\n" not in str(caught.value)


def test_directories_without_megatrons_files(saved: Path) -> None:
    """The form that versions up to 0.2 had besides: one line says which version converts it."""
    for file in ("metadata.json", ".metadata", "__0_0.distcp", "common.pt"):
        (saved / file).unlink()
    source = SourceConfig(load=str(saved))
    with pytest.raises(CheckpointError, match=r"has no metadata\.json"):
        load_model(source, {})
    (saved / "model.safetensors").touch()
    line = f"up to version 0.2, which converts it: megatron-ext run --load {saved} --save NEW"
    with pytest.raises(CheckpointError, match=line) as caught:
        load_model(source, {})
    assert "\n" not in str(caught.value)
    (saved / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_model(source, {})


def test_a_new_checkpoint_that_cannot_take_its_place_leaves_the_old_one(
    saved: Path, tiny_model: nn.Module, tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TE-6: the old checkpoint stays, even if the failure comes after it was moved aside."""
    rename = Path.rename

    def fail_for_the_new_one(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise OSError("planted")
        return rename(path, target)

    before = (saved / "__0_0.distcp").read_bytes()
    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(ConfigError, match="planted"):
        save_dist_checkpoint(saved, tiny_model, tiny_config)
    assert (saved / "__0_0.distcp").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"]
