"""Checkpoints that Megatron-LM trained: hybrid and GPT models, from Transformer Engine specs and local ones."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from megatron_ext.models.build import build_model
from megatron_ext.models.load import load_model
from megatron_ext.text.tokenizer import TextTokenizer
from tests.on_request import long_except
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.megatron import megatron_lm
from tests.unit_tests.models.megatron.megatron_lm import GPT, gpt_arguments, gpt_model, perturbed
from tests.unit_tests.models.test_load import write_tokenizer
from tests.unit_tests.support.saved_models import load_dist_checkpoint

CPU = torch.device("cpu")
TOKENS = oracle.prompt(40, seed=0, vocab_size=50)


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    first, second = dict(one.named_parameters()), dict(other.named_parameters())
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=oracle.ATOL, rtol=oracle.RTOL)


@pytest.fixture
def written(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> Path:
    """A hybrid of Megatron-LM's that a test may spoil."""
    tensors = megatron_lm.stored_tensors(tiny_model, tiny_config)
    return megatron_lm.write(tmp_path / "run", tensors, megatron_lm.arguments(tiny_config))


CHANGES = [
    {},
    {"untie_embeddings_and_output_weights": True, "swiglu": True, "squared_relu": False},
    {"normalization": "LayerNorm", "disable_bias_linear": False, "position_embedding_type": "learned_absolute"},
    {"hybrid_override_pattern": "M-*MM*-", "position_embedding_type": "rope", "squared_relu": True},
]
EVERY = list(itertools.product(CHANGES, (True, False), ("0.18", "0.19")))
PAIRS = [one for one in EVERY if (CHANGES.index(one[0]) + one[1] + (one[2] == "0.18")) % 2 == 0]


@pytest.mark.parametrize(
    ("changes", "fused", "version"),
    long_except(PAIRS, EVERY),
    ids=[f"{changes}-{'Transformer Engine' if fused else 'local'}-{version}" for changes, fused, version in EVERY],
)
def test_hybrid(changes: dict, fused: bool, version: str, tiny_config: ModelConfig, tmp_path: Path) -> None:
    """The hybrid loads from a checkpoint that holds training state too; the common state is a file or an object."""
    config = ModelConfig(**(tiny_config.to_dict() | changes))
    model = perturbed(build_model(config, device=CPU, seed=3))
    tensors = megatron_lm.stored_tensors(model, config, fused=fused)
    args = megatron_lm.arguments(config)
    megatron_lm.write(tmp_path, tensors, args, **megatron_lm.training_state(tensors))
    if version == "0.19":
        megatron_lm.as_later_versions_write(tmp_path / "iter_0000100")
    loaded, loaded_config = load_dist_checkpoint(tmp_path)
    assert same_parameters(loaded, model)
    assert_same_logits(oracle.our_logits(loaded, TOKENS), oracle.our_logits(model, TOKENS))
    for name in ("query_groups", "head_channels", "mamba_heads", "ffn_size", "layer_count"):
        assert getattr(loaded_config, name) == getattr(config, name)


def test_fused_and_local_norms_are_not_both_wanted(written: Path) -> None:
    """A norm that is there twice is one too many, whichever is meant."""
    iteration = written / "iter_0000100"
    tensors = megatron_lm.read_tensors(iteration)
    tensors["decoder.layers.1.input_layernorm.weight"] = torch.ones(32)
    args = megatron_lm.arguments(load_dist_checkpoint(iteration)[1])
    megatron_lm.write(written / "twice", tensors, args)
    with pytest.raises(CheckpointError, match=r"has unexpected decoder\.layers\.1\.input_layernorm\.weight"):
        load_dist_checkpoint(written / "twice")


@pytest.mark.parametrize("untied", [False, True])
def test_padded_vocabulary(untied: bool, tiny_config: ModelConfig, tmp_path: Path) -> None:
    """All rows are kept, as Megatron keeps them, unless the real size is given."""
    config = dataclasses.replace(tiny_config, vocab_size=64, untie_embeddings_and_output_weights=untied)
    model = build_model(config, device=CPU, seed=3)
    megatron_lm.write(tmp_path, megatron_lm.stored_tensors(model, config), megatron_lm.arguments(config, vocab_size=50))
    padded, _ = load_dist_checkpoint(tmp_path)
    assert same_parameters(padded, model)
    cut, cut_config = load_dist_checkpoint(tmp_path, vocab_size=50)
    assert cut_config.vocab_size == 50
    assert_same_logits(oracle.our_logits(cut, TOKENS), oracle.our_logits(model, TOKENS)[..., :50])
    source = SourceConfig(load=str(tmp_path))
    assert load_model(source, {"vocab_size": 50}, device=CPU).config.vocab_size == 50
    for size in (48, 65):
        with pytest.raises(ConfigError, match=f"--vocab-size {size} does not fit .*give more than 48 and at most 64"):
            load_model(source, {"vocab_size": size}, device=CPU)


def test_vocabulary_that_contradicts_the_arguments(
    tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path
) -> None:
    tensors = megatron_lm.stored_tensors(tiny_model, tiny_config)
    megatron_lm.write(tmp_path, tensors, megatron_lm.arguments(tiny_config, padded_vocab_size=64))
    message = r"embedding.word_embeddings.weight has shape \(50, 32\), and the configuration requires \(64, 32\)"
    with pytest.raises(CheckpointError, match=message):
        load_dist_checkpoint(tmp_path)


@pytest.mark.parametrize(("latest", "name"), [("100", "iter_0000100"), ("release", "release"), ("7\n", "iter_0000007")])
def test_latest_iteration(latest: str, name: str, written: Path, tiny_model: nn.Module) -> None:
    (written / "iter_0000100").rename(written / name)
    (written / "latest_checkpointed_iteration.txt").write_text(latest)
    for directory in (written, written / name):
        assert same_parameters(load_dist_checkpoint(directory)[0], tiny_model)
    loaded = load_model(SourceConfig(load=str(written)), {}, device=CPU)
    assert same_parameters(loaded.model, tiny_model)
    assert loaded.name == str(written)


def set_latest(text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / "latest_checkpointed_iteration.txt").write_text(text)


def make_legacy(directory: Path) -> None:
    (directory / "iter_0000100" / "metadata.json").unlink()
    (directory / "iter_0000100" / "mp_rank_00").mkdir()


DIRECTORIES = {
    "says 200, and .* has no iter_0000200": set_latest("200"),
    "says 'soon', which is not an iteration": set_latest("soon"),
    "says '', which is not an iteration": set_latest(""),
    r"says '\.\./x', which is not an iteration": set_latest("../x"),
    "has no latest_checkpointed_iteration.txt; give an iteration, as in iter_0000100": lambda directory: (
        directory / "latest_checkpointed_iteration.txt"
    ).unlink(),
    "is of Megatron's format 'torch'; only 'torch_dist' is supported": make_legacy,
    "is of Megatron's format 'torch_dcp'": lambda directory: (directory / "iter_0000100" / "metadata.json").unlink(),
}


@pytest.mark.parametrize("message", DIRECTORIES)
def test_directories_that_cannot_be_read(message: str, written: Path) -> None:
    DIRECTORIES[message](written)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(SourceConfig(load=str(written)), {}, device=CPU)
    assert "\n" not in str(caught.value)


def test_a_flipped_byte_of_a_checkpoint_with_digests(written: Path) -> None:
    """The common state could be read as other arguments; the manifest is verified before anything is read."""
    iteration = written / "iter_0000100"
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in iteration.iterdir()}
    (iteration / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))
    load_model(SourceConfig(load=str(written)), {}, device=CPU)
    for name in files:
        content = (iteration / name).read_bytes()
        middle = len(content) // 2
        (iteration / name).write_bytes(content[:middle] + bytes((content[middle] ^ 4,)) + content[middle + 1 :])
        with pytest.raises(CheckpointError, match=f"{name} is damaged: its SHA-256"):
            load_dist_checkpoint(written)
        (iteration / name).write_bytes(content)


def test_without_arguments(tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path) -> None:
    tensors = megatron_lm.stored_tensors(tiny_model, tiny_config)
    megatron_lm.write_files(tmp_path / "bare", tensors, {"iteration": 1})
    with pytest.raises(
        CheckpointError, match=r"has neither our config\.json nor Megatron-LM's arguments in its common state"
    ):
        load_dist_checkpoint(tmp_path / "bare")


def test_tokenizer_beside_the_weights_or_above_them(written: Path) -> None:
    source = SourceConfig(load=str(written))
    write_tokenizer(written, 40)
    above = load_model(source, {}, device=CPU).tokenizer
    write_tokenizer(written / "iter_0000100", 45)
    beside = load_model(source, {}, device=CPU).tokenizer
    assert isinstance(above, TextTokenizer)
    assert (above.vocab_size, beside.vocab_size) == (40, 45)


GPT_FAMILIES = {
    "llama": {"swiglu": True, "untie_embeddings_and_output_weights": True},
    "gpt2": {"normalization": "LayerNorm", "disable_bias_linear": False, "position_embedding_type": "learned_absolute"},
    "nemotron": {"squared_relu": True, "rotary_percent": 0.5, "rotary_base": 5000},
    "qwen2": {"swiglu": True, "add_qkv_bias": True},
}


def gpt_logits(model: GPTModel) -> Tensor:
    length = len(TOKENS)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    with torch.no_grad():
        return model(torch.tensor([TOKENS]), torch.arange(length)[None], mask)[0]


@pytest.mark.parametrize("stacked", [True, False], ids=["one tensor of all layers", "one tensor a layer"])
@pytest.mark.parametrize("family", GPT_FAMILIES)
def test_gpt(family: str, stacked: bool, tmp_path: Path) -> None:
    """Logits are upstream's: of its own GPT, saved by its own description of itself."""
    config = dataclasses.replace(GPT, **GPT_FAMILIES[family])
    model = gpt_model(config)
    state = {"model": model.sharded_state_dict(metadata={"non_homogeneous_layers": not stacked})}
    state["args"] = gpt_arguments(config)
    write_state(state, tmp_path)
    loaded, loaded_config = load_dist_checkpoint(tmp_path)
    assert loaded_config.hybrid_override_pattern == "*-*-*-"
    assert_same_logits(oracle.our_logits(loaded, TOKENS), gpt_logits(model))


def test_gpt_with_norms_of_their_own_and_singleton_shards(tmp_path: Path) -> None:
    """The newer way of Megatron: one tensor a layer, and the halves of a gated layer under keys of their own."""
    config = dataclasses.replace(GPT, **GPT_FAMILIES["llama"])
    model = gpt_model(config)
    how = {"singleton_local_shards": True}
    state = {"model": model.sharded_state_dict(metadata=dict(how)), "args": gpt_arguments(config)}
    for name, sharded in state["model"].items():
        sharded.key = name if "layernorm" in name else sharded.key
    write_state({**state, "content_metadata": how}, tmp_path)
    keys = dist_checkpointing.load_tensors_metadata(str(tmp_path))
    assert {"decoder.layers.0.input_layernorm.weight", "decoder.layers.2.mlp.linear_fc1.weight_v"} <= keys.keys()
    loaded, _ = load_dist_checkpoint(tmp_path)
    assert_same_logits(oracle.our_logits(loaded, TOKENS), gpt_logits(model))
