"""The size of a model is known, and refused where it cannot be had, before anything is allocated."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.models import build
from megatron_ext.models.build import build_model
from megatron_ext.models.size import check_model_fits, matrix_parameter_count
from megatron_ext.parallel.layout import Share
from tests.unit_tests.models.conftest import TINY

SIGMOID = {"num_experts": 4, "moe_router_score_function": "sigmoid"}
SHAPES = {
    "hybrid": TINY,
    "attention": dataclasses.replace(
        TINY, hybrid_override_pattern="*-*-", swiglu=True, squared_relu=False, kv_channels=24
    ),
    "untied": dataclasses.replace(TINY, untie_embeddings_and_output_weights=True, mamba_num_heads=6),
    "positions": dataclasses.replace(TINY, position_embedding_type="learned_absolute", ffn_hidden_size=40),
    "gated delta net": dataclasses.replace(
        TINY,
        recurrent_layer="gated_delta_net",
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "gated attention": dataclasses.replace(TINY, attention_output_gate=True, qk_layernorm=True),
    "gated shared experts": dataclasses.replace(
        TINY,
        hybrid_override_pattern="*E",
        moe_shared_expert_intermediate_size=20,
        moe_shared_expert_gate=True,
        num_experts=4,
    ),
    "side by side": dataclasses.replace(TINY, hybrid_override_pattern="P-P-"),
    "norms behind": dataclasses.replace(TINY, hybrid_override_pattern="AFM-"),
    "short convolutions": dataclasses.replace(TINY, recurrent_layer="short_conv", short_conv_kernel_dim=5),
    "Mamba-1": dataclasses.replace(TINY, recurrent_layer="mamba1", mamba_inner_size=72, mamba_dt_rank=5),
    "experts": dataclasses.replace(TINY, hybrid_override_pattern="ME*", moe_ffn_hidden_size=24, **SIGMOID),
    "shared experts": dataclasses.replace(
        TINY, hybrid_override_pattern="EE", moe_shared_expert_intermediate_size=20, moe_latent_size=12, **SIGMOID
    ),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matrices_are_counted(shape: ModelConfig):
    """Parameters that are not counted are vectors."""
    model = build_model(shape, device=torch.device("cpu"))
    matrices = [p.numel() for p in model.parameters() if p.dim() > 1]
    assert matrix_parameter_count(shape) == sum(matrices)
    assert sum(matrices) > 0.9 * sum(p.numel() for p in model.parameters())


def test_parts_of_stages_and_of_experts():
    """TE-6: a tied output is a table of its own on the last stage; experts are spread, their router is not."""

    def count(shape: ModelConfig, parallel: ParallelConfig, stages: tuple[range, ...], index: int = 0) -> int:
        return matrix_parameter_count(shape, Share(parallel, stages, index))

    two, stages = ParallelConfig(pipeline_model_parallel_size=2), (range(1), range(1, 3))
    table = TINY.vocab_size * TINY.hidden_size
    for shape, copies in ((SHAPES["hybrid"], 1), (SHAPES["untied"], 0)):
        parts = [count(shape, two, stages, index) for index in range(2)]
        assert sum(parts) == matrix_parameter_count(shape) + copies * table
    for shape in (SHAPES["untied"], SHAPES["positions"]):  # the embedding again, for multi-token prediction
        shape = dataclasses.replace(shape, mtp_num_layers=1, mtp_hybrid_override_pattern="*-")
        parts = [count(shape, two, stages, index) for index in range(2)]
        is_learned = shape.position_embedding_type == "learned_absolute"
        copies = table + is_learned * shape.max_position_embeddings * shape.hidden_size
        assert sum(parts) == matrix_parameter_count(shape) + copies
    experts = SHAPES["experts"]
    routed = experts.num_experts * 2 * experts.hidden_size * experts.moe_ffn_hidden_size
    half = count(experts, ParallelConfig(expert_model_parallel_size=2), (range(3),))
    assert half == matrix_parameter_count(experts) - routed // 2


def test_a_model_that_does_not_fit_is_refused_in_one_line():
    needed = 2 * matrix_parameter_count(TINY)
    check_model_fits(TINY, torch.bfloat16, needed)
    with pytest.raises(ConfigError) as caught:
        check_model_fits(TINY, torch.bfloat16, needed - 1)
    message = str(caught.value)
    assert "\n" not in message
    for part in ("hidden size 32", "3 layers", "50 vocabulary entries", "bfloat16", "--hidden-size"):
        assert part in message
    needed = 4 * matrix_parameter_count(TINY)
    for available, advice in ((needed // 2, "; give --bf16"), (needed // 2 - 1, "fewer layers")):
        with pytest.raises(ConfigError) as caught:
            check_model_fits(TINY, torch.float32, available)
        assert advice in str(caught.value)


def test_parameters_that_cannot_be_allocated_are_one_line(monkeypatch: pytest.MonkeyPatch):
    """SE-4: a failed allocation is one line, even if there seemed to be room."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes.")

    monkeypatch.setattr(build, "HybridModel", fail)
    with pytest.raises(ConfigError, match=r"memory for its parameters: .* in float32, .*; --bf16 needs half of it"):
        build_model(TINY, device=torch.device("cpu"))


def test_the_memory_that_is_free_decides(monkeypatch: pytest.MonkeyPatch):
    """A model that is built anywhere else is not where nothing is free, and nothing is built."""
    build_model(TINY, device=torch.device("cpu"))
    monkeypatch.setattr(platform, "available_memory", lambda on: 0)
    monkeypatch.setattr(build, "HybridModel", None)  # would be a TypeError
    with pytest.raises(ConfigError, match=r"0\.00 GB of memory are free for this process"):
        build_model(TINY, device=torch.device("cpu"))
