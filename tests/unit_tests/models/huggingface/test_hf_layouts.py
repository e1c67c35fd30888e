"""MR-4: Hugging Face checkpoints of every family at any layout, as a cut of what one rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_ext.config import ParallelConfig, SourceConfig
from megatron_ext.mcore.checkpoint.weight_shards import Piece, ShardSpec, model_shards, model_tensors, whole_shard
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.huggingface import hf_checkpoint
from megatron_ext.models.load import load_model
from tests.unit_tests.models.huggingface.nemotron_h_oracle import ATOL, RTOL
from tests.unit_tests.support.layouts import CPU, Part, assert_parts_of, held, load, logits, part_of, sizes
from tests.unit_tests.support.ranks import run_ranks

pytestmark = pytest.mark.worlds

TOKENS = [int(token) for token in torch.randint(101, (40,), generator=torch.Generator().manual_seed(2))]
# Shapes by family that ranks can share: at TP 2 those of two groups and more, at EP 2 those with experts.
SHAPES = {
    "TP 2": {
        "oracles": ("mqa, other window, epsilon and chunk, no D", "attention only"),
        "llamas": ("mha", "gqa, tied"),
        "mambas": ("mamba, tied", "falcon", "jamba", "jamba, experts"),
        "qwens": ("dense", "experts"),
        "denses": ("llama, biases of attention, yarn", "llama, biases of MLPs, tied", "qwen2", "qwen3 moe"),
        "hybrids": ("mamba2", "granite, dense", "lfm2, tied", "falcon_h1, norm first", "qwen3_5 moe"),
    },
    "PP 2": {
        "oracles": ("mha", "gqa, groups, wide heads, tied", "MoE"),
        "llamas": ("gqa, tied",),
        "mambas": ("mamba, tied", "jamba, experts"),
        "qwens": ("experts",),
        "denses": ("llama, biases of MLPs, tied", "qwen2, window, yarn, tied", "mixtral", "gpt-oss"),
        "hybrids": ("bamba", "lfm2, tied", "falcon_h1, no norm", "qwen3_5, that reads images too", "olmo"),
    },
    "EP 2": {
        "oracles": ("MoE", "MoE, latent, one expert a token"),
        "mambas": ("jamba, experts",),
        "qwens": ("experts",),
        "denses": ("qwen3 moe", "gpt-oss"),
        "hybrids": ("granite, experts, rotary, tied", "qwen3_5 moe"),
    },
}
SHAPES["TP 2, whole experts"] = {"denses": ("gpt-oss", "qwen3 moe")}
LAYOUTS = {
    "TP 2": sizes(tp=2),
    "PP 2": sizes(pp=2),
    "EP 2": sizes(ep=2),
    "TP 2, whole experts": sizes(tp=2, etp=1),
}


def load_all(directories: Sequence[Path], parallel: ParallelConfig) -> list[Part]:
    return [part_of(load(directory, parallel, is_hf=True), TOKENS) for directory in directories]


def whole_model(directory: Path) -> nn.Module:
    model = load_model(SourceConfig(load_hf=str(directory)), {}, device=CPU).model
    assert isinstance(model, HybridModel)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_families(layout, request):
    families = {fixture: request.getfixturevalue(fixture) for fixture in SHAPES[layout]}
    directories = [families[fixture](name)[1] for fixture, names in SHAPES[layout].items() for name in names]
    by_rank = run_ranks(load_all, 2, directories, LAYOUTS[layout])
    for directory, parts in zip(directories, zip(*by_rank, strict=True), strict=True):
        model = whole_model(directory)
        assert_parts_of(held(model), parts)
        answers = [part.logits for part in parts if part.logits is not None]
        assert answers
        for answer in answers:
            torch.testing.assert_close(answer, logits(model, TOKENS), atol=2 * ATOL, rtol=RTOL)


def load_interleaved(directory: Path, parallel: ParallelConfig) -> Tensor | None:
    """A rank takes its share of an input projection's rows without regard to the parts that they are of."""

    def without_parts(model: HybridModel) -> dict[str, ShardSpec]:
        cuts = model_shards(model)
        for name, tensor in model_tensors(model).items():
            if name.endswith("mixer.in_proj.weight"):
                own = whole_shard(name, tensor.shape).pieces[0].local
                first = model.tp_group.rank() * len(tensor)
                there = (slice(first, first + len(tensor)), own[1])
                cuts[name] = ShardSpec(name, cuts[name].shape, (Piece(there, own),))
        return cuts

    hf_checkpoint.model_shards = without_parts
    return logits(load(directory, parallel, is_hf=True), TOKENS)


def test_rows_cut_in_the_wrong_place_are_seen(oracles):
    """A negative control: the logits of the other test can fail."""
    directory = oracles(SHAPES["TP 2"]["oracles"][0])[1]
    (wrong, _) = run_ranks(load_interleaved, 2, directory, sizes(tp=2))
    assert (wrong - logits(whole_model(directory), TOKENS)).abs().max() > 0.01
