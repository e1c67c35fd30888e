"""Weights of Hugging Face in files: shards, other names and cuts, types, and whatever does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_ext.config import ParallelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors
from megatron_ext.models.huggingface.export import export_hf_checkpoint
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.models.update.naming import naming_of
from megatron_ext.models.weight_files import INDEX_FILE, WEIGHTS_FILE
from megatron_ext.parallel.layout import check_model
from tests.on_request import long_except
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.huggingface.oracles import LAST, edit_weights, excess, load_hf
from tests.unit_tests.support.saved_models import load_dist_checkpoint
from tests.unit_tests.support.weights import writer_of

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]


def tensors_of(model: nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.fixture
def copied(oracles, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of a shape's checkpoint, which a test may spoil."""
    return lambda name: shutil.copytree(oracles(name)[1], tmp_path / "copy")


# Shards


@pytest.fixture
def shards(oracles, tmp_path: Path) -> Path:
    """A Llama as transformers cuts it up, into at least three files."""
    oracles("llama")[0].save_pretrained(tmp_path / "shards", max_shard_size="16KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) >= 3
    return tmp_path / "shards"


def edit_index(directory: Path, change: Callable[[dict], object]) -> None:
    """Rewrite the index; `change` modifies the map from tensors to shards in place."""
    index = json.loads((directory / INDEX_FILE).read_text())
    change(index["weight_map"])
    (directory / INDEX_FILE).write_text(json.dumps(index))


def test_shards_with_an_index(shards: Path, oracles) -> None:
    """`model.safetensors` wins if there is an index too, as in transformers."""
    theirs, directory = oracles("llama")
    assert excess(load_hf(shards).model, theirs) <= 1
    shutil.copy(directory / WEIGHTS_FILE, shards)
    edit_index(shards, lambda m: m.clear())
    assert excess(load_hf(shards).model, theirs) <= 1


def test_missing_and_damaged_files_are_named(shards: Path, hf_copy: Path) -> None:
    shard, *_ = sorted(shards.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name} cannot be read"):
        load_hf(shards)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} names the shard {shard.name}, which is missing"):
        load_hf(shards)
    (hf_copy / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match="only safetensors weights are supported"):
        load_hf(hf_copy)


NORM = "model.norm.weight"
INDEX_ERRORS = {
    "a tensor is not listed": lambda m: m.pop(NORM),
    "a tensor that is nowhere": lambda m: m.update({"model.more.weight": m[NORM]}),
    "a tensor in another shard": lambda m: m.update({NORM: m["model.embed_tokens.weight"]}),
}


@pytest.mark.parametrize("error", INDEX_ERRORS)
def test_index_that_disagrees(error: str, shards: Path) -> None:
    edit_index(shards, INDEX_ERRORS[error])
    with pytest.raises(CheckpointError, match="do not list the same tensors") as caught:
        load_hf(shards)
    assert "\n" not in str(caught.value)


# Other names, cuts and types


@pytest.mark.parametrize("name", ["llama, tied", "nemotron, groups, wide heads, tied"])
def test_tied_embeddings(name: str, copied, oracles) -> None:
    """Stored once or twice; two that differ are refused."""
    theirs, directory = oracles(name)[0], copied(name)
    embedding = "model.embed_tokens.weight" if name == "llama, tied" else "backbone.embeddings.weight"
    edit_weights(directory, lambda t: t.pop("lm_head.weight", None))
    once = load_hf(directory).model
    assert "output_layer.weight" not in dict(once.named_parameters())
    edit_weights(directory, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert max(excess(model, theirs) for model in (once, load_hf(directory).model)) <= 1
    edit_weights(directory, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(CheckpointError, match=rf"tie_word_embeddings is true, but {embedding} and lm_head.weight diff"):
        load_hf(directory)


def with_other_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.replace("backbone.", "model.")] = tensors.pop(name)


def with_frequencies(tensors: Tensors) -> None:
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in (0, 1)}


CONVOLUTION = "model.layers.0.linear_attn.{}_conv1d.weight"


def as_projected(tensors: Tensors) -> None:
    """Queries, keys and values apart, as in the authors' files; transformers cuts into thirds."""
    names = [CONVOLUTION.format(one) for one in "qkv"]
    whole = torch.cat([tensors.pop(name) for name in names])
    tensors |= {name: part.clone() for name, part in zip(names, whole.split([16, 16, 48]), strict=True)}


def fuse_gated(tensors: Tensors) -> None:
    """All experts of a layer in one tensor, gate above up, as published files have them."""
    for layer in range(3):
        start = f"model.layers.{layer}.mlp.experts"
        parts = [[tensors.pop(f"{start}.{i}.{one}_proj.weight") for one in ("gate", "up", "down")] for i in range(6)]
        tensors[f"{start}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in parts])
        tensors[f"{start}.down_proj"] = torch.stack([down for *_, down in parts])


EXPERTS = "backbone.layers.1.mixer.experts"


def fuse(tensors: Tensors) -> None:
    """The experts of a layer as transformers has them in memory: one tensor with a dimension more."""
    for projection in ("up_proj", "down_proj"):
        parts = [tensors.pop(f"{EXPERTS}.{expert}.{projection}.weight") for expert in range(6)]
        tensors[f"{EXPERTS}.{projection}"] = torch.stack(parts)


@pytest.mark.parametrize(
    ("name", "change", "is_kept"),
    [
        ("nemotron", with_other_prefix, True),
        ("llama", with_frequencies, False),  # of older files; the configuration gives them
        ("olmo", as_projected, True),
        ("qwen3_5 moe", fuse_gated, True),
        ("nemotron MoE", fuse, True),  # the other layer with experts keeps a tensor an expert
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_other_names_and_cuts(name: str, change: Change, is_kept: bool, copied, oracles, tmp_path: Path) -> None:
    """FA-1: they are read alike, and written back as they were."""
    directory = copied(name)
    edit_weights(directory, change)
    loaded = load_hf(directory)
    assert_equal(tensors_of(loaded.model), tensors_of(load_hf(oracles(name)[1]).model))
    export_hf_checkpoint(tmp_path / "back", loaded.model, loaded.config, directory)
    back, expected = load_file(tmp_path / "back" / WEIGHTS_FILE), load_file(directory / WEIGHTS_FILE)
    if is_kept:
        assert_equal(back, expected)
    else:
        assert back.keys() < expected.keys()


def test_sixteen_bits(hf_copy: Path) -> None:
    """bf16 files load into fp32 parameters without further rounding, and into bf16 ones but for the decays."""
    edit_weights(hf_copy, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    stored = load_file(hf_copy / WEIGHTS_FILE)["backbone.layers.0.mixer.in_proj.weight"]
    wide, narrow = (dict(load_hf(hf_copy, bf16=bf16).model.named_parameters()) for bf16 in (False, True))
    name = "decoder.layers.0.mixer.in_proj.weight"
    assert torch.equal(wide[name], stored.float())
    assert torch.equal(narrow[name], stored)
    assert narrow["decoder.layers.0.mixer.A_log"].dtype is torch.float32


def test_own_checkpoint_keeps_the_expert_bias(oracles, tmp_path: Path) -> None:
    """The expert bias is a buffer, and stays in fp32 when the weights do not."""
    loaded, name = load_hf(oracles("nemotron MoE")[1]), "decoder.layers.1.mlp.router.expert_bias"
    bias = loaded.model.get_buffer(name)
    assert bias.abs().min() > 0
    save_dist_checkpoint(tmp_path / "own", loaded.model, loaded.config, dtype=torch.bfloat16)
    model, _ = load_dist_checkpoint(tmp_path / "own", dtype=torch.bfloat16)
    assert torch.equal(model.get_buffer(name), bias)


# What does not fit


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(shape).to(dtype)})


def fuse_five(tensors: Tensors) -> None:
    fuse(tensors)
    tensors[f"{EXPERTS}.up_proj"] = tensors[f"{EXPERTS}.up_proj"][:5].contiguous()


def fuse_twice(tensors: Tensors) -> None:
    kept = dict(tensors)
    fuse(tensors)
    tensors.update(kept)


LAYERS = "model.layers"
SPOILED: list[tuple[str, Change, str]] = [
    ("llama", lambda t: t.pop(f"{LAYERS}.1.mlp.up_proj.weight"), r"lacks layers\.1\.mlp\.up_proj\.weight"),
    ("llama", lambda t: t.pop("lm_head.weight"), r"lacks lm_head\.weight"),
    ("llama", put(f"{LAYERS}.2.mlp.up_proj.weight", 40, 32), r"has unexpected layers\.2\.mlp\.up_proj\.weight"),
    ("llama", put(f"{LAYERS}.0.mlp.gate_proj.weight", 48, 32), r"gate_proj.weight has shape \(48, 32\), .* \(40, 32\)"),
    ("llama", put("norm.weight", 32), "has both model.norm.weight and norm.weight"),
    ("nemotron", lambda t: t.pop("backbone.layers.0.mixer.A_log"), "lacks backbone.*|lacks layers.0.mixer.A_log"),
    ("nemotron", put("backbone.layers.0.mixer.conv1d.weight", 64, 1, 3), r"shape \(64, 1, 3\), .* \(64, 1, 4\)"),
    ("nemotron", put("backbone.norm_f.weight", 32, dtype=torch.int64), "norm_f.weight is of type int64"),
    ("nemotron", put("model.norm_f.weight", 32), "has both backbone.norm_f.weight and model.norm_f.weight"),
    ("nemotron MoE", fuse_five, "lacks layers.1.mixer.experts.5.up_proj.weight"),
    ("nemotron MoE", fuse_twice, rf"has both {EXPERTS}.(up|down)_proj and {EXPERTS}.0."),
    ("nemotron MoE", put(f"{EXPERTS}.6.up_proj.weight", 24, 32), "has unexpected layers.1.mixer.experts.6.up_proj"),
    (
        "nemotron MoE",
        lambda t: t.pop("backbone.layers.1.mixer.gate.e_score_correction_bias"),
        "lacks layers.1.mixer.gate.e_score_correction_bias",
    ),
    ("qwen3_next moe", put(f"{LAYERS}.0.linear_attn.in_proj_ba.weight", 9, 32), r"shape \(9, 32\).*\(8, 32\)"),
    ("olmo", lambda t: t.pop(CONVOLUTION.format("k")), r"lacks .*\.k_conv1d\.weight, which is a part of"),
    ("olmo", put(CONVOLUTION.replace("{}_", ""), 80, 1, 4), r"has both .*linear_attn\.conv1d\.weight and .*q_conv1d"),
    ("olmo", put(CONVOLUTION.format("k"), 27, 1, 5), "are not parts of one"),
    (
        "olmo",
        put(CONVOLUTION.format("k"), 28, 1, 4),
        r"shape \(81, 1, 4\), .* requires \(80, 1, 4\)",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), SPOILED, ids=[f"{one[0]} {one[2][:40]}" for one in SPOILED])
def test_tensors_that_do_not_fit_are_refused(name: str, change: Change, message: str, copied) -> None:
    """FA-2."""
    directory = copied(name)
    edit_weights(directory, change)
    with pytest.raises(CheckpointError, match=message):
        load_hf(directory)


# Models in memory


@pytest.mark.parametrize(
    "name", ["mamba2", "granite moe, rotary, tied", "lfm2 moe", "qwen3_5 moe", "olmo", "nemotron MoE"]
)
def test_names_in_memory(name: str, oracles) -> None:
    """PY-6: names are those of transformers' own model, with experts and convolutions as single tensors."""
    theirs, directory = oracles(name)
    loaded = load_hf(directory)
    expected = tensors_of(loaded.model)
    with torch.no_grad():
        for tensor in loaded.model.parameters():
            tensor.zero_()
    writer_of(loaded.model, naming_of(SourceConfig(load_hf=str(directory)), loaded.config)).write(theirs.state_dict())
    assert_equal(tensors_of(loaded.model), expected)


QUICK = [LAST[kind] for kind in ("mamba2", "jamba", "lfm2_moe")]
MORE = [LAST[kind] for kind in ("mamba", "qwen3_next", "falcon_h1", "olmo_hybrid", "granitemoehybrid", "qwen3_5_moe")]


@pytest.mark.parametrize("name", long_except(QUICK, QUICK + MORE))
def test_training(name: str, oracles) -> None:
    """M1-1: the same logits where gradients are wanted, and every parameter gets one."""
    model, tokens = load_hf(oracles(name)[1]).model, oracle.prompt(40, seed=1)
    expected = oracle.our_logits(model, tokens)
    model.train()
    logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)[0]
    assert oracle.largest_excess(logits.detach(), expected) <= 1
    logits.square().mean().backward()
    assert [one for one, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert [one for one, p in model.named_parameters() if not p.grad.any()] == []


def test_models_that_ranks_cannot_share(oracles) -> None:
    """MR-1: a model that ranks cannot share is refused before anything is allocated."""
    for name, message in (
        ("olmo", r"a norm of the queries of all heads .* cannot be split over .* 2 ranks"),
        (LAST["mamba2"], "1 Mamba groups cannot be split over --tensor-model-parallel-size 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_model(ParallelConfig(tensor_model_parallel_size=2), load_hf(oracles(name)[1]).config)
