"""MR-4: a checkpoint of any form loads at any layout, each rank its own part, and the model computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_ext.config import ParallelConfig
from megatron_ext.models.megatron.checkpoint import save_dist_checkpoint
from megatron_ext.models.native.checkpoint import save_checkpoint
from tests.unit_tests.support.layouts import (
    CONFIGS,
    Part,
    assert_parts_of,
    held,
    load,
    logits,
    part_of,
    perturbed_model,
    sizes,
)
from tests.unit_tests.support.ranks import run_ranks

pytestmark = pytest.mark.worlds

TOKENS = [int(token) for token in torch.randint(96, (40,), generator=torch.Generator().manual_seed(1))]
SAVE = {"native": save_checkpoint, "distributed": save_dist_checkpoint}
DENSE = ("mamba2", "odd vocabulary", "untied", "biases", "mamba1", "gated_delta_net")
LAYOUTS = [
    (sizes(tp=2), (*DENSE, "latent_experts")),
    (sizes(pp=2), (*DENSE, "latent_experts")),
    (sizes(pp=2, first=1), ("mamba2",)),
    (sizes(pp=4), ("mamba2",)),  # stages of two, one, one and one layers
    (sizes(tp=2, pp=2), ("odd vocabulary", "latent_experts")),
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
    return [part_of(model, TOKENS) for model in models]


@pytest.mark.parametrize(("parallel", "kinds"), LAYOUTS, ids=lambda value: getattr(value, "described", lambda: "")())
def test_each_rank_has_its_part(parallel, kinds, stored):
    """Of checkpoints of both forms; the ranks together compute what one computes."""
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
