"""Imported Llama checkpoints: tied embeddings, scaled wavelengths, types and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.config import SourceConfig
from megatron_ext.config.source import HfOverrides
from megatron_ext.errors import CheckpointError
from megatron_ext.models.load import load_model, save_model
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.families import excess, load_hf

TIED = "gqa, tied"
CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def test_layers_and_embeddings(llamas) -> None:
    """Each layer is an attention and an MLP; what is tied is there once."""
    config = load_hf(llamas(TIED)[1]).config
    assert (config.hybrid_override_pattern, config.untie_embeddings_and_output_weights) == ("*-*-*-", False)
    assert "lm_head.weight" not in load_file(llamas(TIED)[1] / "model.safetensors")
    assert "output_layer.weight" in dict(load_hf(llamas("mha")[1]).model.named_parameters())
    assert "output_layer.weight" not in dict(load_hf(llamas(TIED)[1]).model.named_parameters())


@pytest.mark.parametrize("factor", [1, 2])
def test_tied_embeddings_stored_twice(factor: int, llamas, tmp_path: Path) -> None:
    """Equal ones are loaded, different ones refused."""
    theirs, saved = llamas(TIED)
    directory = shutil.copytree(saved, tmp_path / "hf")
    oracle.edit_weights(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * factor}))
    if factor == 1:
        assert excess(load_hf(directory).model, theirs) <= 1
    else:
        with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight and lm_head\.weight differ"):
            load_hf(directory)


def test_scaled_wavelengths_matter(llamas, tmp_path: Path) -> None:
    """Negative control: without scaling, or with another factor, long prompts have other logits; saved, it is kept."""
    theirs, directory = llamas("scaled wavelengths")
    loaded = load_hf(directory)
    save_model(str(tmp_path / "saved"), loaded)
    again = load_model(SourceConfig(load=str(tmp_path / "saved")), {}, device=CPU)
    assert excess(again.model, theirs, 400) <= 1
    scaling = json.loads((directory / "config.json").read_text("utf-8"))["rope_parameters"]
    for override in ({"rope_type": "default", "rope_theta": 20000.0}, scaling | {"factor": 4.0}):
        changed = load_hf(directory, hf_overrides=HfOverrides.of({"rope_parameters": override})).model
        assert excess(changed, theirs, 400) > 10, override


# Files


@pytest.fixture
def shards(llamas, tmp_path: Path) -> Path:
    """The checkpoint "mha" as transformers cuts it up, into at least three files."""
    llamas("mha")[0].save_pretrained(tmp_path / "shards", max_shard_size="16KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) >= 3
    assert (tmp_path / "shards" / INDEX).is_file()
    return tmp_path / "shards"


def edit_index(directory: Path, change) -> None:
    """Rewrite the index; `change` modifies the map from tensors to shards in place."""
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_shards_with_an_index(shards: Path, llamas) -> None:
    assert excess(load_hf(shards).model, llamas("mha")[0]) <= 1


def test_missing_shard_is_named(shards: Path) -> None:
    shard = sorted(shards.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{INDEX} names the shard {shard.name}, which is missing"):
        load_hf(shards)


def test_damaged_shard_is_named(shards: Path) -> None:
    shard = sorted(shards.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name} cannot be read"):
        load_hf(shards)


INDEX_ERRORS = {
    "a tensor is not listed": (lambda m: m.pop("model.norm.weight"), "do not list the same tensors"),
    "a tensor that is nowhere": (
        lambda m: m.update({"model.more.weight": m["model.norm.weight"]}),
        "do not list the same tensors",
    ),
    "a tensor in another shard": (
        lambda m: m.update({"model.norm.weight": m["model.embed_tokens.weight"]}),
        "do not list the same tensors",
    ),
    "a shard outside the directory": (
        lambda m: m.update({"model.norm.weight": "../elsewhere.safetensors"}),
        "names the shard '../elsewhere.safetensors', which is not a file name",
    ),
    "a shard that is no name": (
        lambda m: m.update({"model.norm.weight": 3}),
        "names the shard 3, which is not a file name",
    ),
}


@pytest.mark.parametrize("error", INDEX_ERRORS)
def test_index_that_disagrees(error: str, shards: Path) -> None:
    change, message = INDEX_ERRORS[error]
    edit_index(shards, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_hf(shards)
    assert "\n" not in str(caught.value)


def test_rotary_frequencies_of_older_files(llama_copy: Path, llamas) -> None:
    """Frequencies in the file are ignored, since the configuration gives them; any other unknown tensor is refused."""
    oracle.edit_weights(
        llama_copy,
        lambda t: t.update({f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in (0, 1)}),
    )
    assert excess(load_hf(llama_copy).model, llamas("mha")[0]) <= 1
    oracle.edit_weights(llama_copy, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
    with pytest.raises(CheckpointError, match=r"has unexpected layers\.0\.self_attn\.q_proj\.bias"):
        load_hf(llama_copy)


SPOILED = {
    r"lacks layers\.1\.mlp\.up_proj\.weight": lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
    r"lacks lm_head\.weight": lambda t: t.pop("lm_head.weight"),
    r"has unexpected layers\.2\.mlp\.up_proj\.weight": lambda t: t.update(
        {"model.layers.2.mlp.up_proj.weight": torch.ones(40, 32)}
    ),
    r"gate_proj.weight has shape \(48, 32\), and the configuration requires \(40, 32\)": lambda t: t.update(
        {"model.layers.0.mlp.gate_proj.weight": torch.ones(48, 32)}
    ),
    r"v_proj.weight has shape \(16, 32\), and the configuration requires \(32, 32\)": lambda t: t.update(
        {"model.layers.0.self_attn.v_proj.weight": torch.ones(16, 32)}
    ),
    "has both model.norm.weight and norm.weight": lambda t: t.update({"norm.weight": torch.ones(32)}),
}


@pytest.mark.parametrize("message", SPOILED)
def test_files_that_do_not_fit_are_refused(message: str, llama_copy: Path) -> None:
    oracle.edit_weights(llama_copy, SPOILED[message])
    with pytest.raises(CheckpointError, match=message):
        load_hf(llama_copy)


def test_sixteen_bits(llama_copy: Path, llamas) -> None:
    """bf16 files: into fp32 parameters without further rounding, into bf16 ones with as much of it as theirs have."""
    theirs, tokens = llamas("mha")[0], oracle.prompt(65, seed=0)
    oracle.edit_weights(llama_copy, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    stored = load_file(llama_copy / "model.safetensors")
    wide = load_hf(llama_copy).model.get_parameter("output_layer.weight")
    assert torch.equal(wide.bfloat16(), stored["lm_head.weight"])
    narrow = load_model(SourceConfig(load_hf=str(llama_copy), bf16=True), {}, device=CPU)
    their_narrow = type(theirs).from_pretrained(llama_copy, dtype=torch.bfloat16).eval()
    assert narrow.dtype is their_narrow.dtype is torch.bfloat16
    exact = oracle.their_logits(theirs, tokens)
    error = (oracle.our_logits(narrow.model, tokens).float() - exact).abs().mean()
    their_error = (oracle.their_logits(their_narrow, tokens).float() - exact).abs().mean()
    assert error < 1.2 * their_error


def test_imported_checkpoint_saved_and_loaded(llamas, tmp_path: Path) -> None:
    """--load-hf, --save, --load: the same configuration and the same logits."""
    imported = load_hf(llamas(TIED)[1])
    save_model(tmp_path / "own", imported)
    loaded = load_model(SourceConfig(load=str(tmp_path / "own")), {}, device=CPU)
    assert loaded.config == imported.config
    tokens = oracle.prompt(65, seed=0)
    assert torch.equal(oracle.our_logits(loaded.model, tokens), oracle.our_logits(imported.model, tokens))


def test_whole_file_beside_an_index(shards: Path, llamas) -> None:
    """`model.safetensors` wins if there is an index too, as in transformers."""
    tensors = load_file(llamas("mha")[1] / "model.safetensors")
    save_file(tensors, shards / "model.safetensors", metadata={"format": "pt"})
    edit_index(shards, lambda m: m.clear())
    assert excess(load_hf(shards).model, llamas("mha")[0]) <= 1
