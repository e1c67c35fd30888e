"""Tensors of recurrent and hybrid families under other names and in other cuts; training; what ranks cannot share."""

from __future__ import annotations

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
from megatron_ext.models.load import load_model
from megatron_ext.models.update.naming import naming_of
from megatron_ext.models.weight_files import WEIGHTS_FILE, WeightFiles
from megatron_ext.parallel.layout import check_model
from tests.on_request import long_except
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.families import CPU, load_hf
from tests.unit_tests.models.huggingface.test_hybrids import LAST
from tests.unit_tests.support.weights import writer_of

OLMO = "olmo"
CONVOLUTION = "model.layers.0.linear_attn.{}_conv1d.weight"


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model_tensors(model).items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", LAST)
def test_names_in_memory(name: str, hybrids) -> None:
    """PY-6: names are those of transformers' own model, with experts and convolutions as single tensors."""
    theirs, directory = hybrids(name)
    source = SourceConfig(load_hf=str(directory))
    loaded = load_model(source, {}, device=CPU)
    expected = tensors_of(loaded.model)
    with torch.no_grad():
        for tensor in loaded.model.parameters():
            tensor.zero_()
    writer_of(loaded.model, naming_of(source, loaded.config)).write(theirs.state_dict())
    assert_equal(tensors_of(loaded.model), expected)


@pytest.mark.parametrize("name", long_except(list(LAST)[:3], LAST))
def test_training(name: str, hybrids) -> None:
    """M1-1: the same logits where gradients are wanted, and every parameter gets one."""
    loaded, tokens = load_model(SourceConfig(load_hf=str(hybrids(name)[1])), {}, device=CPU), oracle.prompt(40, seed=1)
    loaded.model.train()
    logits = loaded.model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)[0]
    assert oracle.largest_excess(logits.detach(), oracle.our_logits(load_hf(hybrids(name)[1]).model, tokens)) <= 1
    logits.square().mean().backward()
    assert [one for one, p in loaded.model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert [one for one, p in loaded.model.named_parameters() if not p.grad.any()] == []


@pytest.fixture
def olmo(hybrids, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return shutil.copytree(hybrids(OLMO)[1], tmp_path / "olmo")


def _as_projected(tensors: dict[str, Tensor]) -> None:
    """Queries, keys and values apart, as in the authors' files; transformers cuts into thirds."""
    names = [CONVOLUTION.format(one) for one in "qkv"]
    whole = torch.cat([tensors.pop(name) for name in names])
    tensors |= {name: part.clone() for name, part in zip(names, whole.split([16, 16, 48]), strict=True)}


def test_a_convolution_cut_elsewhere(olmo: Path, hybrids, tmp_path: Path) -> None:
    """FA-1: a convolution is joined from any parts, and written back in those parts."""
    rows = [WeightFiles(olmo).shape(CONVOLUTION.format(one))[0] for one in "qkv"]
    oracle.edit_weights(olmo, _as_projected)
    loaded = load_model(SourceConfig(load_hf=str(olmo)), {}, device=CPU)
    assert_equal(tensors_of(loaded.model), tensors_of(load_hf(hybrids(OLMO)[1]).model))
    export_hf_checkpoint(tmp_path / "back", loaded.model, loaded.config, olmo)
    back = [WeightFiles(tmp_path / "back").shape(CONVOLUTION.format(one))[0] for one in "qkv"]
    assert (rows, back) == ([27, 27, 26], [16, 16, 48])


def _fused(tensors: dict[str, Tensor]) -> None:
    """All experts of a layer in one tensor, gate above up, as published files have them."""
    for layer in range(3):
        start = f"model.layers.{layer}.mlp.experts"
        parts = [[tensors.pop(f"{start}.{i}.{one}_proj.weight") for one in ("gate", "up", "down")] for i in range(6)]
        tensors[f"{start}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in parts])
        tensors[f"{start}.down_proj"] = torch.stack([down for *_, down in parts])


def test_experts_in_one_tensor(hybrids, tmp_path: Path) -> None:
    """FA-1: experts in one tensor are read alike, and written back as one."""
    separate = hybrids("qwen3_5 moe")[1]
    fused = shutil.copytree(separate, tmp_path / "fused")
    oracle.edit_weights(fused, _fused)
    loaded = load_model(SourceConfig(load_hf=str(fused)), {}, device=CPU)
    assert_equal(tensors_of(loaded.model), tensors_of(load_hf(separate).model))
    export_hf_checkpoint(tmp_path / "back", loaded.model, loaded.config, fused)
    assert_equal(load_file(tmp_path / "back" / WEIGHTS_FILE), load_file(fused / WEIGHTS_FILE))


def _drop_one(tensors: dict[str, Tensor]) -> None:
    del tensors[CONVOLUTION.format("k")]


def _add_whole(tensors: dict[str, Tensor]) -> None:
    tensors[CONVOLUTION.replace("{}_", "")] = torch.ones(80, 1, 4)


def _misfit(tensors: dict[str, Tensor]) -> None:
    tensors[CONVOLUTION.format("k")] = torch.ones(27, 1, 5)


def _too_many(tensors: dict[str, Tensor]) -> None:
    tensors[CONVOLUTION.format("k")] = torch.ones(28, 1, 4)


SPOILED: dict[str, Callable[[dict[str, Tensor]], None]] = {
    r"lacks model\.layers\.0\.linear_attn\.k_conv1d\.weight, which is a part of": _drop_one,
    r"has both model\.layers\.0\.linear_attn\.conv1d\.weight and .*q_conv1d": _add_whole,
    "are not parts of one": _misfit,
    r"conv1d.weight has shape \(81, 1, 4\), and the configuration requires \(80, 1, 4\)": _too_many,
}


@pytest.mark.parametrize("message", SPOILED)
def test_parts_that_do_not_fit_are_named(message: str, olmo: Path) -> None:
    """FA-2."""
    oracle.edit_weights(olmo, SPOILED[message])
    with pytest.raises(CheckpointError, match=message):
        load_model(SourceConfig(load_hf=str(olmo)), {}, device=CPU)


def test_models_that_ranks_cannot_share(hybrids) -> None:
    """MR-1: a model that ranks cannot share is refused before anything is allocated."""
    with pytest.raises(ConfigError, match=r"a norm of the queries of all heads .* cannot be split over .* 2 ranks"):
        check_model(ParallelConfig(tensor_model_parallel_size=2), load_hf(hybrids(OLMO)[1]).config)
    with pytest.raises(ConfigError, match="1 Mamba groups cannot be split over --tensor-model-parallel-size 2"):
        check_model(ParallelConfig(tensor_model_parallel_size=2), load_hf(hybrids(LAST[0])[1]).config)
