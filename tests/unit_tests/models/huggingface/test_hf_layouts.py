"""MR-4: Hugging Face checkpoints of every family at any layout, as a cut of what one rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_ext.config import ParallelConfig
from megatron_ext.mcore.checkpoint.weight_shards import Piece, ShardSpec, model_shards, model_tensors, whole_shard
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.huggingface import hf_checkpoint
from tests.unit_tests.models.huggingface.oracles import ATOL, RTOL, load_hf
from tests.unit_tests.support.layouts import Part, assert_parts_of, held, load, logits, part_of, sizes
from tests.unit_tests.support.ranks import run_ranks

pytestmark = pytest.mark.worlds

TOKENS = [int(token) for token in torch.randint(101, (40,), generator=torch.Generator().manual_seed(2))]
# Shapes that ranks can share: at TP 2 those of two groups and more, at EP 2 those with experts.
SHAPES = {
    "TP 2": (
        "nemotron, MQA, other window, epsilon and chunk",
        "llama, tied",
        "llama, biases, yarn",
        "mamba, tied",
        "falcon_mamba",
        "jamba moe",
        "qwen3_next moe",
        "qwen3 moe",
        "mamba2",
        "granite",
        "lfm2, tied",
        "falcon_h1, norm first",
        "qwen3_5 moe",
    ),
    "PP 2": (
        "nemotron, groups, wide heads, tied",
        "nemotron MoE",
        "qwen2, window, yarn, tied",
        "gpt-oss",
        "jamba moe",
        "bamba",
        "falcon_h1",
        "qwen3_5, that reads images too",
        "olmo",
    ),
    "EP 2": (
        "nemotron MoE, latent, one expert a token",
        "jamba moe",
        "qwen3_next moe",
        "gpt-oss",
        "granite moe, rotary, tied",
        "qwen3_5 moe",
    ),
    "TP 2, whole experts": ("gpt-oss", "qwen3 moe"),
}
LAYOUTS = {
    "TP 2": sizes(tp=2),
    "PP 2": sizes(pp=2),
    "EP 2": sizes(ep=2),
    "TP 2, whole experts": sizes(tp=2, etp=1),
}


def load_all(directories: Sequence[Path], parallel: ParallelConfig) -> list[Part]:
    return [part_of(load(directory, parallel, is_hf=True), TOKENS) for directory in directories]


def whole_model(directory: Path) -> nn.Module:
    model = load_hf(directory).model
    assert isinstance(model, HybridModel)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_families(layout, oracles):
    directories = [oracles(name)[1] for name in SHAPES[layout]]
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
    directory = oracles(SHAPES["TP 2"][0])[1]
    (wrong, _) = run_ranks(load_interleaved, 2, directory, sizes(tp=2))
    assert (wrong - logits(whole_model(directory), TOKENS)).abs().max() > 0.01
