"""docs/scale.md: its formulas are what is built, and its tables are what the formulas give."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core import parallel_state

from benchmarks.simulation import scale
from megatron_ext.config import BatchingConfig, ModelConfig, ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.layers.layer_map import model_shape
from megatron_ext.models.build import build_model
from megatron_ext.models.size import matrix_parameter_count
from megatron_ext.parallel.layout import share_of
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import with_vocabulary
from tests.unit_tests.support.source import ROOT

DOCUMENT = (ROOT / "docs/scale.md").read_text("utf-8")
BYTES = 4  # fp32


@pytest.mark.parametrize("name", scale.tables())
def test_the_tables_are_those_of_the_formulas(name):
    """`python -m benchmarks simulation.scale` prints what belongs there."""
    assert scale.tables()[name] in DOCUMENT


def sizes(tensor: int = 1, pipeline: int = 1, expert: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert
    )


LAYOUTS = {
    "TP 2": (2, sizes(tensor=2)),
    "PP 2": (2, sizes(pipeline=2)),
    "EP 2": (2, sizes(expert=2)),
    "TP 2 x EP 2": (4, sizes(tensor=2, expert=2)),
}
MODELS = {
    "TP 2": ("hybrid", "mamba1", "gated_delta_net", "experts"),
    "PP 2": ("hybrid", "attention_only"),
    "EP 2": ("experts",),
    "TP 2 x EP 2": ("experts",),
}


def see(parallel: ParallelConfig, models: dict[str, ModelConfig]) -> dict[str, tuple[int, int, int, int]]:
    """Return for each model the stage of a rank, its parameters of matrices, bytes of a token, and of states."""
    platform.initialize(parallel)
    stage, seen = parallel_state.get_pipeline_model_parallel_rank(), {}
    for name, config in models.items():
        model = build_model(config, device=torch.device("cpu"), parallel=parallel)
        shape = model_shape(model, BatchingConfig(), torch.float32)
        matrices = sum(one.numel() for one in model.parameters() if one.dim() > 1)
        seen[name] = stage, matrices, shape.kv_bytes_per_token, 0 if shape.states is None else shape.states.bytes
    return seen


@pytest.mark.worlds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formulas_give_the_memory_of_ranks(layout):
    size, parallel = LAYOUTS[layout]
    configs = {name: with_vocabulary(CONFIGS[name]) for name in MODELS[layout]}
    for rank in run_ranks(see, size, parallel, configs):
        for name, config in configs.items():
            stage, matrices, kv, states = rank[name]
            share = share_of(parallel, config, stage)
            assert matrices == matrix_parameter_count(config, share)
            assert kv == scale.kv_bytes_per_token(config, share, BYTES)
            if config.recurrent_layer == "mamba2":
                assert states == scale.state_bytes(config, share, BYTES)


def test_computed_tokens_are_those_not_skipped():
    """A prompt of which nothing is skipped, and the sum of its two halves."""
    config = scale.MODELS["8B"]
    output = 2 * config.vocab_size * config.hidden_size
    whole = scale.prefill_flops(config, 4096, 0)
    halves = scale.prefill_flops(config, 2048, 0) + scale.prefill_flops(config, 4096, 2048)
    assert whole == halves - output
    one_layer = dataclasses.replace(config, hybrid_override_pattern="-")
    matrices = 2 * config.hidden_size * config.ffn_size
    assert scale.prefill_flops(one_layer, 10, 3) == 7 * 2 * matrices + output
