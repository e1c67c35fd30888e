"""MR-4: a checkpoint of any form loads at any layout, each rank its own part, and the model computes the same."""

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
from megatron_ext.mcore.checkpoint.weight_shards import Piece, ShardSpec, model_shards, model_tensors, whole_shard
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.models.native import safetensors_checkpoint
from megatron_ext.models.native.directory import read_header
from megatron_ext.models.native.safetensors_checkpoint import save_checkpoint
from megatron_ext.models.size import matrix_parameter_count
from megatron_ext.parallel.share import share_of
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
SAVE = {"native": save_checkpoint, "distributed": save_dist_checkpoint}
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
    """A model of one rank and where it is, by kind and form; each is made once."""
    made = {}

    def get(kind: str, form: str):
        if (kind, form) not in made:
            model, directory = perturbed_model(CONFIGS[kind]).eval(), tmp_path_factory.mktemp(kind)
            SAVE[form](directory, model, CONFIGS[kind])
            made[kind, form] = (model, directory)
        return made[kind, form]

    return get


def load_and_compute(directories: Sequence[Path], parallel: ParallelConfig) -> list[Part]:
    models = [load(directory, parallel) for directory in directories]
    stage = platform.pipeline_stage()
    for directory, model in zip(directories, models, strict=True):  # the size that was foretold is the size
        config = read_header(directory).model
        assert matrix_parameter_count(config, share_of(parallel, config, stage)) == matrices(model)
    return [part_of(model, TOKENS) for model in models]


@pytest.mark.parametrize(("parallel", "kinds"), LAYOUTS, ids=lambda value: getattr(value, "described", lambda: "")())
def test_each_rank_has_its_part(parallel, kinds, stored):
    """Each rank has its part of checkpoints of both forms; the ranks together compute the output of one."""
    cases = [(kind, form) for kind in kinds for form in SAVE]
    directories = [stored(*case)[1] for case in cases]
    by_rank = run_ranks(load_and_compute, parallel.smallest_world, directories, parallel)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        model = stored(*case)[0]
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

    safetensors_checkpoint.model_shards = without_parts
    return logits(load(directory, parallel), TOKENS)


def test_rows_cut_in_the_wrong_place_are_seen(stored):
    """A negative control: the logits of the other tests can fail."""
    model, directory = stored("mamba2", "native")
    (wrong, _) = run_ranks(load_interleaved, 2, directory, sizes(tp=2))
    assert (wrong - logits(model, TOKENS)).abs().max() > 0.01
