"""Imported NemotronH checkpoints: tied embeddings, files, types, and the memory of the oracle."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.models.huggingface.tensors import interleave_qkv
from megatron_ext.models.load import load_model
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.families import load_hf

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [shape for shape in oracle.SHAPES if shape.tied], ids=lambda shape: shape.name)
def test_tied_embeddings_stored_once(shape: oracle.Shape, oracles, tmp_path: Path) -> None:
    theirs, saved = oracles(shape.name)
    directory = shutil.copytree(saved, tmp_path / "hf")
    oracle.edit_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))
    loaded, tokens = load_hf(directory), oracle.prompt(65, seed=0)
    assert not loaded.config.untie_embeddings_and_output_weights
    assert "output_layer.weight" not in dict(loaded.model.named_parameters())
    assert oracle.largest_excess(oracle.our_logits(loaded.model, tokens), oracle.their_logits(theirs, tokens)) <= 1


def test_tied_embeddings_that_differ_are_refused(oracles, tmp_path: Path) -> None:
    directory = shutil.copytree(oracles("gqa, groups, wide heads, tied")[1], tmp_path / "hf")
    oracle.edit_weights(directory, lambda tensors: tensors["lm_head.weight"].mul_(2))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but .*embeddings.weight and lm_head"):
        load_hf(directory)


def test_older_prefix_and_shards(hf_copy: Path, oracles) -> None:
    """Names that begin with "model.", in two files with an index."""
    theirs, _ = oracles("mha")
    tensors = load_file(hf_copy / "model.safetensors")
    (hf_copy / "model.safetensors").unlink()
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in tensors.items()}
    shards, weight_map = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), {}
    for index, shard in enumerate(shards):
        part = {name: renamed[name] for name in sorted(renamed)[index::2]}
        save_file(part, hf_copy / shard)
        weight_map |= dict.fromkeys(part, shard)
    (hf_copy / "model.safetensors.index.json").write_text('{"weight_map": ' + str(weight_map).replace("'", '"') + "}")
    tokens = oracle.prompt(65, seed=1)
    logits = oracle.our_logits(load_hf(hf_copy).model, tokens)
    assert oracle.largest_excess(logits, oracle.their_logits(theirs, tokens)) <= 1
    (hf_copy / shards[1]).unlink()
    with pytest.raises(CheckpointError, match=f"names the shard {shards[1]}, which is missing"):
        load_hf(hf_copy)


def test_sixteen_bits(hf_copy: Path, oracles) -> None:
    """bf16 files load into fp32 parameters without further rounding, and into bf16 ones but for the decays."""
    oracle.edit_weights(hf_copy, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    stored = load_file(hf_copy / "model.safetensors")
    wide = dict(load_hf(hf_copy).model.named_parameters())
    assert torch.equal(
        wide["decoder.layers.0.mixer.in_proj.weight"].bfloat16(), stored["backbone.layers.0.mixer.in_proj.weight"]
    )
    narrow = load_model(SourceConfig(load_hf=str(hf_copy), bf16=True), {}, device=CPU)
    assert narrow.dtype is torch.bfloat16
    parameters = dict(narrow.model.named_parameters())
    assert parameters["decoder.layers.0.mixer.in_proj.weight"].dtype is torch.bfloat16
    assert parameters["decoder.layers.0.mixer.A_log"].dtype is torch.float32


@torch.no_grad()
def test_oracle_has_a_long_memory(oracles) -> None:
    """States that the first tokens left decide the logits 250 tokens later, in a model without attention."""
    theirs, _ = oracles("no attention")
    tokens, other = oracle.prompt(300, seed=5), oracle.prompt(50, seed=6)
    changed = oracle.their_logits(theirs, other + tokens[50:])
    assert oracle.largest_excess(changed[-1], oracle.their_logits(theirs, tokens)[-1]) > 100


def test_time_step_min_is_no_clamp(oracles) -> None:
    """Transformers clamps dt at `time_step_min` in its chunk path only; the import follows its one-token path."""
    theirs, directory = oracles("mqa, other window, epsilon and chunk, no D")
    ours, tokens = load_hf(directory).model, oracle.prompt(129, seed=4)
    clamped = type(theirs).from_pretrained(directory, dtype=torch.float32).eval()
    assert oracle.largest_excess(oracle.our_logits(ours, tokens), oracle.their_logits(clamped, tokens)) > 100
    cached, past = [], None
    with torch.no_grad():
        for token in tokens:
            step = theirs(torch.tensor([[token]]), past_key_values=past, use_cache=True)
            past = step.past_key_values
            cached.append(step.logits[0, 0])
    assert oracle.largest_excess(oracle.our_logits(ours, tokens), torch.stack(cached)) <= 1


def test_query_key_value_rows() -> None:
    """Two groups of two query heads, one row a head: [q0 q1 k0 v0 | q2 q3 k1 v1]."""
    config = ModelConfig(
        hybrid_override_pattern="*", hidden_size=4, num_attention_heads=4, num_query_groups=2, kv_channels=1
    )
    rows = torch.arange(8.0)[:, None].expand(8, 4)
    assert interleave_qkv([rows[:4], rows[4:6], rows[6:]], config)[:, 0].tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


SPOILED = {
    "lacks backbone.*|lacks layers.0.mixer.A_log": lambda t: t.pop("backbone.layers.0.mixer.A_log"),
    "has unexpected .*rotary": lambda t: t.update({"backbone.rotary.inv_freq": torch.ones(2)}),
    r"k_proj.weight has shape \(8, 32\), and the configuration requires \(32, 32\)": lambda t: t.update(
        {"backbone.layers.1.mixer.k_proj.weight": torch.ones(8, 32)}
    ),
    r"conv1d.weight has shape \(64, 1, 3\), and the configuration requires \(64, 1, 4\)": lambda t: t.update(
        {"backbone.layers.0.mixer.conv1d.weight": torch.ones(64, 1, 3)}
    ),
    "norm_f.weight is of type int64": lambda t: t.update({"backbone.norm_f.weight": torch.ones(32).long()}),
    "has both backbone.norm_f.weight and model.norm_f.weight": lambda t: t.update(
        {"model.norm_f.weight": torch.ones(32)}
    ),
}


@pytest.mark.parametrize("message", SPOILED)
def test_files_that_do_not_fit_are_refused(message: str, hf_copy: Path) -> None:
    oracle.edit_weights(hf_copy, SPOILED[message])
    with pytest.raises(CheckpointError, match=message):
        load_hf(hf_copy)


def test_damaged_or_missing_weights(hf_copy: Path) -> None:
    file = hf_copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_hf(hf_copy)
    file.unlink()
    with pytest.raises(CheckpointError, match="only safetensors weights are supported"):
        load_hf(hf_copy)
