"""Megatron-LM's arguments: what they become, and by which name they are refused."""

from __future__ import annotations

import dataclasses
from argparse import Namespace

import pytest

from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError
from megatron_ext.models.megatron.training_args import config_from_args
from tests.unit_tests.models.megatron import megatron_lm

HYBRID = ModelConfig(
    hybrid_override_pattern="M-M*E",
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=16,
    mamba_state_dim=24,
    mamba_head_dim=32,
    mamba_num_heads=6,
    mamba_num_groups=3,
    num_experts=8,
    moe_ffn_hidden_size=40,
    moe_router_topk=3,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.5,
    position_embedding_type="rope",
    rotary_base=50000,
    rotary_percent=0.5,
    normalization="LayerNorm",
    squared_relu=True,
    untie_embeddings_and_output_weights=True,
    max_position_embeddings=512,
    vocab_size=512,
)
EXPERTS = {name: value for name, value in HYBRID.to_dict().items() if name == "num_experts" or name.startswith("moe_")}


def arguments(**changes: object) -> Namespace:
    return megatron_lm.arguments(HYBRID, **(EXPERTS | changes))


def converted(args: object, *, is_gpt: bool = False, vocab_size: int | None = None) -> ModelConfig:
    return config_from_args(args, "common.pt", is_gpt=is_gpt, vocab_size=vocab_size)


def test_every_field_of_a_hybrid() -> None:
    assert converted(arguments()) == HYBRID


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rotary_base": 50000.0}, {}),
        ({"group_query_attention": False, "num_query_groups": 1}, {"num_query_groups": None}),
        ({"hybrid_override_pattern": None, "hybrid_layer_pattern": "M-|M*|E"}, {}),
        ({"add_bias_linear": None, "disable_bias_linear": True}, {}),
        ({"mamba_num_heads": None}, {"mamba_num_heads": None, "mamba_num_groups": 2}),
        ({"norm_epsilon": None, "layernorm_epsilon": 1e-5}, {}),
        ({"moe_router_load_balancing_type": "aux_loss", "rope_type": "rope", "softmax_type": "vanilla"}, {}),
        ({"spec": None}, {}),
        ({"mtp_num_layers": 1}, {}),  # of unknown layers
        ({"add_qkv_bias": True}, {"add_qkv_bias": True}),
        (
            {"hybrid_override_pattern": None, "hybrid_layer_pattern": "M-|M*|E/*E", "mtp_num_layers": 1},
            {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": "*E"},
        ),
    ],
    ids=str,
)
def test_other_ways_to_say_it(changes: dict, expected: dict) -> None:
    if "mamba_num_groups" in expected:
        changes = changes | {"mamba_num_groups": expected["mamba_num_groups"]}
    assert converted(arguments(**changes)) == dataclasses.replace(HYBRID, **expected)


@pytest.mark.parametrize(
    "changes", [{"add_bias_linear": True, "add_qkv_bias": True}, {"add_bias_linear": None}], ids=str
)
def test_biases(changes: dict) -> None:
    """Every linear layer has biases, unless Megatron was told otherwise."""
    config = converted(arguments(hybrid_override_pattern="M-M*-", **changes))
    assert not config.disable_bias_linear
    assert config.num_experts is None, "without E layers nothing of experts is taken over"


def test_pattern_from_ratios() -> None:
    """Ten layers, a fifth attention and three tenths MLP, where Megatron puts them; none of either is all Mamba."""
    args = arguments(hybrid_override_pattern=None, num_layers=10, hybrid_attention_ratio=0.2, hybrid_mlp_ratio=0.3)
    pattern = converted(args).hybrid_override_pattern
    assert (pattern.count("M"), pattern.count("*"), pattern.count("-")) == (5, 2, 3)
    args = arguments(hybrid_override_pattern=None, num_layers=3)
    assert converted(args).hybrid_override_pattern == "MMM"


DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 3, "swiglu": True}
DELTA |= {"squared_relu": False, "num_layers": 4, "hybrid_override_pattern": None, "spec": None, "norm_epsilon": 1e-6}


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, "M-M-*-M-"),
        ({"linear_attention_freq": 1}, "*-*-*-*-"),
        ({"linear_attention_freq": [0, 1, 1, 0]}, "*-M-M-*-"),
    ],
)
def test_gpt_with_gated_delta_nets(changes: dict, pattern: str) -> None:
    """LA-2: a layer is one or attention, then an MLP; what Qwen3-Next has besides is taken over."""
    sizes = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2}
    sizes |= {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3}
    flags = {"qk_layernorm": True, "attention_output_gate": True, "apply_layernorm_1p": True}
    args = megatron_lm.arguments(HYBRID, **(DELTA | sizes | flags | {"normalization": "RMSNorm"} | changes))
    config = converted(args, is_gpt=True)
    assert (config.hybrid_override_pattern, config.recurrent_layer) == (pattern, "gated_delta_net")
    assert config.norm_epsilon == 1e-6, "free without Mamba layers"
    for name, value in (sizes | flags).items():
        assert getattr(config, name) == value


def test_older_arguments() -> None:
    """Features without an argument in the first Megatron with GPT in megatron-core are off."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings")
    values = {name: getattr(arguments(), name) for name in (*names, "kv_channels", "padded_vocab_size")}
    config = converted(Namespace(**values), is_gpt=True)
    assert (config.normalization, config.position_embedding_type) == ("LayerNorm", "learned_absolute")
    assert (config.swiglu, config.disable_bias_linear, config.query_groups) == (False, False, 8)


REFUSED = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "rotary_interleaved": True,
    "window_size": (128, 0),
    "heterogeneous_layers_config_path": "layers.json",
    "position_embedding_type": "yarn",
    "normalization": "ScaleNorm",
    "softmax_type": "off-by-one",
    "rotary_seq_len_interpolation_factor": 4,
    "norm_epsilon": 1e-6,
    "rotary_base": 10000.5,
    "spec": ["my_layers", "my_spec"],
    "moe_expert_capacity_factor": 1.25,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "moe_router_load_balancing_type": "sinkhorn",
    "padded_vocab_size": "512",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    message = f"^common.pt has {name} = .*, which is not supported; supported is "
    with pytest.raises(CheckpointError, match=message) as caught:
        converted(arguments(**{name: REFUSED[name]}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 8},
            "with shared experts or a latent width, which have no biases",
        ),
        ({"swiglu": True}, "--squared-relu and --swiglu contradict each other"),
        (
            {"hybrid_override_pattern": "M-G*E"},
            "'M-G\\*E' has M and G; all recurrent layers of a model are of one kind",
        ),
        ({"hybrid_override_pattern": "M-D*E"}, "'M-D\\*E' has a layer 'D', sparse attention over latents"),
        ({"num_layers": 7}, "num_layers = 7, .* supported is 5"),
        ({"hidden_size": None}, "without hidden_size"),
        ({"padded_vocab_size": None}, "without padded_vocab_size"),
        ({"ffn_hidden_size": None}, "without ffn_hidden_size"),
        ({"hidden_size": "64"}, "hidden_size = '64'; it must be of type int"),
    ],
    ids=str,
)
def test_other_refusals(changes: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        converted(arguments(**changes))
    assert "common.pt" in str(caught.value)
    assert "\n" not in str(caught.value)


GPT_WITH_EXPERTS = {"num_layers": 4, "hybrid_override_pattern": None, "spec": None}


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, "*E*E*E*E"),
        ({"moe_layer_freq": 1}, "*E*E*E*E"),
        ({"moe_layer_freq": 3}, "*E*-*-*E"),
        ({"moe_layer_freq": [0, 1, 1, 0]}, "*-*E*E*-"),
        ({"moe_layer_freq": [0, 1, 1, 0], "num_experts": None}, "*-*-*-*-"),
    ],
    ids=str,
)
def test_gpt_with_experts(changes: dict, pattern: str) -> None:
    """MF-1: the layers of a GPT that have experts are those of moe_layer_freq."""
    config = converted(arguments(**(GPT_WITH_EXPERTS | changes)), is_gpt=True)
    assert config.hybrid_override_pattern == pattern
    assert config.moe_router_topk == (3 if config.is_moe else 2)


@pytest.mark.parametrize("args", [None, 3, "text"])
def test_refuses_other_objects_as_arguments(args: object) -> None:
    with pytest.raises(CheckpointError, match=f"has a {type(args).__name__} instead of arguments"):
        converted(args)


GPT = {"num_layers": 3, "hybrid_override_pattern": None, "spec": None, "num_experts": None}


@pytest.mark.parametrize(
    ("changes", "pattern", "window"),
    [
        ({"window_size": None, "window_attn_skip_freq": 2}, "*-*-*-", None),
        ({"window_size": (-1, 0)}, "*-*-*-", None),
        ({"window_size": (127, 0)}, "W-W-W-", 128),
        ({"window_size": [127, 0], "window_attn_skip_freq": 2}, "W-*-W-", 128),
        ({"window_size": (127, 0), "window_attn_skip_freq": [0, 0, 1]}, "*-*-W-", 128),
    ],
    ids=str,
)
def test_windows_of_a_gpt(changes: dict, pattern: str, window: int | None) -> None:
    """MF-1, FA-4: windows are those of window_size, in the layers that window_attn_skip_freq leaves."""
    config = converted(arguments(**(GPT | changes)), is_gpt=True)
    assert (config.hybrid_override_pattern, config.attention_window) == (pattern, window)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (GPT | {"window_size": (127, 1)}, "window_size = .*; supported is a number"),
        (GPT | {"window_size": "127,0"}, "window_size = .*; supported is a number"),
        (GPT | {"window_size": (127, 0), "window_attn_skip_freq": 0}, "window_attn_skip_freq = .* is a number"),
        (GPT | {"window_size": (127, 0), "window_attn_skip_freq": [1, 0]}, "window_attn_skip_freq = .* is a number"),
        *(
            (GPT_WITH_EXPERTS | {"moe_layer_freq": freq}, "moe_layer_freq = .* supported is a number")
            for freq in (0, [0, 1], [0, 1, 2, 0], "2", [True, False, True, True])
        ),
        (DELTA | {"experimental_attention_variant": "dsa"}, "'dsa'.* supported is gated_delta_net"),
        (DELTA | {"swiglu": False}, "experimental_attention_variant = .* with swiglu"),
        (DELTA | {"linear_attention_freq": [1, 0]}, r"linear_attention_freq = \[1, 0\].* for each of 4 layers"),
        (DELTA | {"linear_attention_freq": None}, "linear_attention_freq = None"),
    ],
    ids=str,
)
def test_refusals_of_a_gpt(changes: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        converted(arguments(**changes), is_gpt=True)


@pytest.mark.parametrize("prefix", ["", "yarn_"])
def test_yarn_of_a_gpt(prefix: str) -> None:
    """MF-1: the arguments have one name or the other; a missing one has Megatron's default, which is ours."""
    given = {f"{prefix}rotary_scaling_factor": 8.0, f"{prefix}mscale": 0.5, f"{prefix}beta_fast": None}
    args = arguments(**GPT, position_embedding_type="yarn", **given, yarn_correction_range_round_to_int=False)
    config = converted(args, is_gpt=True)
    assert (config.position_embedding_type, config.yarn_rotary_scaling_factor) == ("rope", 8.0)
    assert (config.yarn_mscale, config.yarn_beta_fast) == (0.5, 32.0)
    assert not config.yarn_correction_range_round_to_int
    with pytest.raises(CheckpointError, match="position_embedding_type = 'yarn', which is not supported"):
        converted(arguments(position_embedding_type="yarn"))
