"""MR-4: a checkpoint of ours loads at any layout, each rank its own part, and the model computes the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.models.megatron.directory import read_header
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.models.size import matrix_parameter_count
from megatron_ext.parallel.layout import share_of
from tests.unit_tests.support.layouts import (
    CONFIGS,
    Part,
    assert_parts_of,
    held,
    load,
    logits,
    matrices,
    part_of,
    perturbed_model,
    random_model,
    sizes,
)
from tests.unit_tests.support.ranks import run_ranks

pytestmark = pytest.mark.worlds

TOKENS = [int(token) for token in torch.randint(96, (40,), generator=torch.Generator().manual_seed(1))]
DENSE = ("mamba2", "odd vocabulary", "untied", "biases", "mamba1", "gated_delta_net")
WORDS, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
ROUTER = "decoder.layers.2.mlp.router.weight"
PREDICTION = ("prediction", "prediction_positions")
LAYOUTS = [
    (sizes(tp=2), (*DENSE, *PREDICTION, "latent_experts")),
    (sizes(pp=2), (*DENSE, *PREDICTION, "latent_experts")),
    (sizes(pp=2, first=1), ("mamba2",)),
    (sizes(pp=4), ("mamba2",)),  # stages of two, one, one and one layers
    (sizes(tp=2, pp=2), ("odd vocabulary", "prediction", "latent_experts")),
    (sizes(ep=2), ("experts", "latent_experts")),
    (sizes(tp=2, ep=2), ("latent_experts",)),
    (sizes(tp=2, ep=2, etp=1), ("latent_experts",)),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory):
    """A model of one rank and where it is, by kind; each is made once."""
    made = {}

    def get(kind: str):
        if kind not in made:
            model, directory = perturbed_model(CONFIGS[kind]).eval(), tmp_path_factory.mktemp(kind)
            save_dist_checkpoint(directory, model, CONFIGS[kind])
            made[kind] = (model, directory)
        return made[kind]

    return get


def load_and_compute(directories: Sequence[Path], parallel: ParallelConfig) -> list[Part]:
    models = [load(directory, parallel) for directory in directories]
    stage = platform.pipeline_stage()
    for directory, model in zip(directories, models, strict=True):  # the size that was foretold is the size
        config = read_header(directory)
        assert matrix_parameter_count(config, share_of(parallel, config, stage)) == matrices(model)
    return [part_of(model, TOKENS) for model in models]


@pytest.mark.parametrize(("parallel", "kinds"), LAYOUTS, ids=lambda value: getattr(value, "described", lambda: "")())
def test_each_rank_has_its_part(parallel, kinds, stored):
    """Each rank has its part; the ranks together compute the output of one."""
    directories = [stored(kind)[1] for kind in kinds]
    by_rank = run_ranks(load_and_compute, parallel.smallest_world, directories, parallel)
    for kind, parts in zip(kinds, zip(*by_rank, strict=True), strict=True):
        model = stored(kind)[0]
        assert_parts_of(held(model), parts)
        answers = [part.logits for part in parts if part.logits is not None]
        assert answers
        for answer in answers:
            torch.testing.assert_close(answer, logits(model, TOKENS), atol=2e-5, rtol=1e-4)


def random_parts(config: ModelConfig, parallel: ParallelConfig) -> Part:
    return part_of(random_model(config, parallel))


@pytest.mark.parametrize(
    ("kind", "parallel", "world", "expected"),
    [
        pytest.param("latent_experts", sizes(tp=2, ep=2), 4, {WORDS, ROUTER}, id="TP 2, EP 2"),
        pytest.param("latent_experts", sizes(pp=2), 4, {WORDS, ROUTER}, id="PP 2, two replicas"),
        pytest.param("prediction", sizes(pp=2), 2, {WORDS}, id="PP 2, prediction"),
        pytest.param("prediction_positions", sizes(pp=2), 2, {WORDS, POSITIONS}, id="PP 2, prediction and positions"),
    ],
)
def test_random_weights_agree(kind, parallel, world, expected):
    """Tensors that several ranks hold are equal: routers, norms, embeddings on the first and last stage."""
    seen: dict[tuple[str, str], Tensor] = {}
    shared = set()
    for part in run_ranks(random_parts, world, CONFIGS[kind], parallel):
        for name, (whole_name, boxes) in part.where.items():
            for box, local in boxes:
                own, key = part.tensors[name][local], (whole_name, str(box))
                shared |= {whole_name} if key in seen else set()
                assert torch.equal(seen.setdefault(key, own), own), key
    assert expected <= shared


def refused_spec(config: ModelConfig, parallel: ParallelConfig) -> str:
    with pytest.raises(ConfigError) as error:
        random_model(config, parallel)
    return str(error.value)


def test_a_foreign_stack_does_not_lose_layers():
    """megatron-core's cannot have stages of 2, 2, 1 and 1 layers: one line on every rank, where it would drop two."""
    config = dataclasses.replace(
        CONFIGS["mamba2"], hybrid_override_pattern="M*-M*-", spec=("tests.unit_tests.support.layouts", "foreign_spec")
    )
    errors = run_ranks(refused_spec, 4, config, sizes(pp=4))
    assert set(errors) == {errors[0]}
    assert "--spec cannot be used with pipeline stages of 2, 2, 1, 1 layers" in errors[0]
