"""MoE layers of NemotronH: their configuration, their routers and their weights.

The comparison with transformers is that of all shapes: test_against_transformers.py, test_engine.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.huggingface.hf_checkpoint import translate
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle
from tests.unit_tests.models.huggingface.families import load_hf
from tests.unit_tests.models.huggingface.test_config import PUBLISHED
from tests.unit_tests.support.saved_models import load_dist_checkpoint

MOE_SHAPES = [shape.name for shape in oracle.SHAPES if "E" in shape.pattern]

# As the published MoE models have it (30B-A3B, layers shortened).
PUBLISHED_MOE = PUBLISHED | {
    "hidden_size": 2688,
    "head_dim": 128,
    "hybrid_override_pattern": "MEM*E",
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}


def test_published_configuration() -> None:
    config = translate(PUBLISHED_MOE)
    assert (config.hybrid_override_pattern, config.num_experts, config.moe_router_topk) == ("MEM*E", 128, 6)
    assert (config.expert_ffn_size, config.moe_shared_expert_intermediate_size) == (1856, 3712)
    assert (config.moe_router_score_function, config.moe_router_enable_expert_bias) == ("sigmoid", True)
    assert config.moe_router_topk_scaling_factor == 2.5
    assert (config.moe_router_num_groups, config.moe_router_group_topk, config.moe_latent_size) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_group": 8, "topk_group": 3}, (8, 3)),
        ({"n_group": 8, "topk_group": 8}, (None, None)),  # all groups are open
        ({"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, None),
    ],
    ids=str,
)
def test_groups(changes: dict, expected: tuple | None) -> None:
    """Groups are ranked by two scores there, by top-k / open groups scores here: supported where that is the same."""
    if expected is None:
        with pytest.raises(ConfigError, match=r"n_group = 2 with topk_group = 1 .* num_experts_per_tok = 3"):
            translate(PUBLISHED_MOE | changes)
        return
    config = translate(PUBLISHED_MOE | changes)
    assert (config.moe_router_num_groups, config.moe_router_group_topk) == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob = False is not supported with num_experts_per_tok = 6"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob = True is not supported with num_experts_per_tok = 1"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes'"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2 is not supported; supported is 1"),
        ({"n_group": 8, "topk_group": 2}, "n_group = 8 with topk_group = 2 .* num_experts_per_tok = 6"),
        ({"n_group": 3}, "n_group = 3 .* must divide n_routed_experts = 128"),
        ({"n_group": 2, "topk_group": 3}, "n_group = 2 with topk_group = 3"),
        ({"n_group": 0}, "n_group = 0"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than n_routed_experts 128"),
        ({"n_routed_experts": 0}, "n_routed_experts = 0"),
        ({"num_local_experts": 64}, "num_local_experts 64 contradicts n_routed_experts 128|n_routed_experts 128 contr"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None"),
        ({"moe_shared_expert_intermediate_size": -1}, "moe_shared_expert_intermediate_size = -1"),
        ({"moe_latent_size": 1.5}, "moe_latent_size = 1.5"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor = 0 .* positive number"),
        ({"routed_scaling_factor": True}, "routed_scaling_factor = True"),
    ],
    ids=str,
)
def test_refused_by_name(changes: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        translate(PUBLISHED_MOE | changes)
    assert "\n" not in str(caught.value)
    if None not in changes.values() and "num_local_experts" not in changes:
        dense = PUBLISHED_MOE | {"hybrid_override_pattern": "M-M*-"} | changes
        assert translate(dense).num_experts is None, "a model without MoE layers has no use for these fields"


@pytest.mark.parametrize("name", MOE_SHAPES)
def test_bias_and_groups_decide(name: str, oracles) -> None:
    """Every expert is used, and the bias and the groups change choices: without them the oracle would test little."""
    theirs, _ = oracles(name)
    tokens = oracle.prompt(300, seed=300)
    for moe in oracle.moe_layers(theirs):
        chosen = _choices(theirs, moe.gate, tokens)
        assert chosen.unique().numel() == moe.gate.num_experts
        bias = moe.gate.e_score_correction_bias.clone()
        moe.gate.e_score_correction_bias.zero_()
        assert not torch.equal(_choices(theirs, moe.gate, tokens), chosen)
        moe.gate.e_score_correction_bias.copy_(bias)
        if moe.gate.topk_group < moe.gate.num_group:
            groups = moe.gate.topk_group
            moe.gate.topk_group = moe.gate.num_group
            assert not torch.equal(_choices(theirs, moe.gate, tokens), chosen)
            moe.gate.topk_group = groups


def _choices(model: nn.Module, gate: nn.Module, tokens: list[int]) -> Tensor:
    """[T, top-k] experts that a router of transformers' model chooses, in ascending order."""
    seen: list[Tensor] = []
    hook = gate.register_forward_hook(lambda gate, args, output: seen.append(output[2]))
    oracle.their_logits(model, tokens)
    hook.remove()
    return seen[0].sort(dim=-1).values


# Weights


@pytest.fixture
def moe_copy(oracles, tmp_path: Path) -> Path:
    """A saved checkpoint (shape "MoE") that a test may spoil."""
    return shutil.copytree(oracles("MoE")[1], tmp_path / "hf")


def _fuse(tensors: dict[str, Tensor], layer: int = 1) -> None:
    """The experts of a layer as transformers has them in memory: one tensor with a dimension more."""
    prefix = f"backbone.layers.{layer}.mixer.experts"
    for projection in ("up_proj", "down_proj"):
        parts = [tensors.pop(f"{prefix}.{expert}.{projection}.weight") for expert in range(6)]
        tensors[f"{prefix}.{projection}"] = torch.stack(parts)


def test_fused_experts(moe_copy: Path, oracles) -> None:
    """Files with all experts of a layer in one tensor; the other MoE layer keeps a tensor an expert."""
    theirs, _ = oracles("MoE")
    oracle.edit_weights(moe_copy, _fuse)
    assert load_file(moe_copy / "model.safetensors")["backbone.layers.1.mixer.experts.up_proj"].shape == (6, 24, 32)
    tokens = oracle.prompt(65, seed=65)
    logits = oracle.our_logits(load_hf(moe_copy).model, tokens)
    assert oracle.largest_excess(logits, oracle.their_logits(theirs, tokens)) <= 1


def _fuse_five(tensors: dict[str, Tensor]) -> None:
    _fuse(tensors)
    name = "backbone.layers.1.mixer.experts.up_proj"
    tensors[name] = tensors[name][:5].contiguous()


def _fuse_twice(tensors: dict[str, Tensor]) -> None:
    kept = dict(tensors)
    _fuse(tensors)
    tensors.update(kept)


SPOILED = {
    "lacks layers.1.mixer.experts.5.up_proj.weight": _fuse_five,
    r"has both backbone.layers.1.mixer.experts.(up|down)_proj and backbone.layers.1.mixer.experts.0.": _fuse_twice,
    "lacks layers.1.mixer.gate.e_score_correction_bias": lambda t: t.pop(
        "backbone.layers.1.mixer.gate.e_score_correction_bias"
    ),
    "has unexpected layers.1.mixer.experts.6.up_proj.weight": lambda t: t.update(
        {"backbone.layers.1.mixer.experts.6.up_proj.weight": torch.ones(24, 32)}
    ),
    r"experts.2.down_proj.weight has shape \(24, 32\), and the configuration requires \(32, 24\)": lambda t: t.update(
        {"backbone.layers.1.mixer.experts.2.down_proj.weight": torch.ones(24, 32)}
    ),
}


@pytest.mark.parametrize("message", SPOILED)
def test_files_that_do_not_fit_are_refused(message: str, moe_copy: Path) -> None:
    oracle.edit_weights(moe_copy, SPOILED[message])
    with pytest.raises(CheckpointError, match=message):
        load_hf(moe_copy)


def test_own_checkpoint_keeps_the_expert_bias(oracles, tmp_path: Path) -> None:
    """The expert bias is a buffer, and stays in fp32 when the weights do not."""
    loaded, name = load_hf(oracles("MoE")[1]), "decoder.layers.1.mlp.router.expert_bias"
    bias = loaded.model.get_buffer(name)
    assert bias.abs().min() > 0
    for dtype in (torch.float32, torch.bfloat16):
        save_dist_checkpoint(tmp_path / "own", loaded.model, loaded.config, dtype=dtype)
        model, config = load_dist_checkpoint(tmp_path / "own", dtype=dtype)
        assert config == loaded.config
        assert model.get_buffer(name).dtype is torch.float32
        assert torch.equal(model.get_buffer(name), bias)
        tokens = oracle.prompt(65, seed=65)
        if dtype is torch.float32:
            assert torch.equal(oracle.our_logits(model, tokens), oracle.our_logits(loaded.model, tokens))
