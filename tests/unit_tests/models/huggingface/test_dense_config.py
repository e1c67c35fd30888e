"""The `config.json` of families with attention in every layer: translated whole, or refused by a field's name."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from transformers import AutoConfig

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.hf_checkpoint import read_hf_config, translate

# As published (layers shortened): Qwen2.5 7B, Qwen3 8B, Qwen3 30B-A3B, Mistral 7B v0.3, Mixtral 8x7B.
_ANY = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "num_hidden_layers": 2}
_ANY |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True}
_QWEN = _ANY | {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
_QWEN_3 = _QWEN | {"attention_bias": False, "head_dim": 128, "rope_scaling": None, "sliding_window": None}
_MISTRAL = _ANY | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
PUBLISHED = {
    "qwen2": _QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "use_mrope": False,
        "vocab_size": 152064,
    },
    "qwen3": _QWEN_3
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    "qwen3_moe": _QWEN_3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "vocab_size": 151936,
    },
    "mistral": _MISTRAL | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32768},
    "mixtral": _MISTRAL
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "vocab_size": 32000,
    },
}
PUBLISHED_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # as Qwen's model cards tell


def test_published_configurations() -> None:
    configs = {name: translate(raw) for name, raw in PUBLISHED.items()}
    assert {name: config.hybrid_override_pattern for name, config in configs.items()} == {
        "qwen2": "*-*-", "qwen3": "*-*-", "qwen3_moe": "*E*E", "mistral": "*-*-", "mixtral": "*E*E",
    }  # fmt: skip
    assert [config.head_channels for config in configs.values()] == [128] * 5
    assert [config.query_groups for config in configs.values()] == [4, 8, 4, 8, 8]
    assert [config.qk_layernorm for config in configs.values()] == [False, True, True, False, False]
    assert [config.add_qkv_bias for config in configs.values()] == [True, False, False, False, False]
    assert not any(config.add_attention_output_bias or config.add_mlp_bias for config in configs.values())
    assert {config.rotary_base for config in configs.values()} == {1000000}
    assert {config.attention_window for config in configs.values()} == {None}
    small, large = configs["mixtral"], configs["qwen3_moe"]
    assert (small.num_experts, small.moe_router_topk, small.expert_ffn_size) == (8, 2, 14336)
    assert (large.num_experts, large.moe_router_topk, large.expert_ffn_size) == (128, 8, 768)
    assert not small.moe_router_pre_softmax
    assert not large.moe_router_pre_softmax


def test_gpt_oss() -> None:
    """FA-1: fields as published; transformers' defaults are the same model, with as many experts as it has."""
    config = translate(PUBLISHED_GPT_OSS)
    assert (config.hybrid_override_pattern, config.attention_window) == ("WE*E", 128)
    assert (config.num_experts, config.moe_router_topk, config.expert_ffn_size) == (32, 4, 2880)
    assert (config.quick_geglu, config.glu_linear_offset, config.activation_func_clamp_value) == (True, 1.0, 7.0)
    assert (config.softmax_type, config.disable_bias_linear, config.rotary_base) == ("learnable", False, 150000)
    assert round(config.rotary_magnitude, 6) == 1.346574
    assert not config.yarn_correction_range_round_to_int
    sizes = {"architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"}
    given = {key: PUBLISHED_GPT_OSS[key] for key in sizes} | {"num_hidden_layers": 2, "num_local_experts": 32}
    assert translate(given) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": False}, "attention_bias = False is not supported; supported is True"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5 is not supported; supported is 1.702"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config = .* is not supported"),
        ({"sliding_window": None}, "layer_types has 'sliding_attention', and sliding_window is null"),
        ({"layer_types": ["sliding_attention"]}, "num_hidden_layers 2 contradicts the 1 layers of layer_types"),
    ],
    ids=str,
)
def test_gpt_oss_that_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(PUBLISHED_GPT_OSS | changes)


def test_missing_fields_get_defaults() -> None:
    """Missing fields get transformers' values: a window in Mistral, none in Mixtral, other bases, untied weights."""
    without = {
        name: {key: value for key, value in raw.items() if key not in ("sliding_window", "rope_theta", "rms_norm_eps")}
        for name, raw in PUBLISHED.items()
    }
    assert [translate(raw).attention_window for raw in without.values()] == [None, None, None, 4096, None]
    assert [translate(raw).rotary_base for raw in without.values()] == [10000] * 4 + [1000000]
    assert [translate(raw).norm_epsilon for raw in without.values()] == [1e-6] * 4 + [1e-5]
    assert translate(without["qwen2"] | {"use_sliding_window": True, "max_window_layers": 0}).attention_window == 4096
    sparse = {key: value for key, value in PUBLISHED["qwen3_moe"].items() if key != "norm_topk_prob"}
    assert translate(sparse).moe_router_pre_softmax


WINDOW = {"use_sliding_window": True, "sliding_window": 1024}
KINDS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": 1024}, "*-*-"),  # switched off
        (WINDOW, "*-*-"),  # from the 28th layer on, and there are two
        (WINDOW | {"max_window_layers": 2}, "*-*-"),
        (WINDOW | {"max_window_layers": 1}, "*-W-"),
        (WINDOW | {"max_window_layers": 2, "layer_types": KINDS}, "*-W-"),  # the list decides
        (WINDOW | {"max_window_layers": 0, "layer_types": KINDS[:1] * 2}, "*-*-"),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, "*-*-"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_of_some_layers(name: str, changes: dict, expected: str) -> None:
    """FA-4: the list decides or, without one, the number of the first layer with a window."""
    config = translate(PUBLISHED[name] | changes)
    assert config.hybrid_override_pattern == expected
    assert config.attention_window == (1024 if "W" in expected else None)


def test_windows_of_all_layers() -> None:
    """FA-4: the window applies to all layers or to none."""
    assert translate(PUBLISHED["qwen3_moe"] | WINDOW).hybrid_override_pattern == "WEWE"
    assert translate(PUBLISHED["qwen3_moe"] | WINDOW).attention_window == 1024
    assert translate(PUBLISHED["mixtral"] | {"sliding_window": 4096}).hybrid_override_pattern == "WEWE"
    assert translate(PUBLISHED["qwen3_moe"] | {"sliding_window": 1024}).attention_window is None
    for name in ("mistral", "mixtral"):
        assert translate(PUBLISHED[name] | {"sliding_window": 4096}).attention_window == 4096


def test_yarn() -> None:
    """Either object is read, with the base inside or outside; missing fields get transformers' defaults."""
    raw = PUBLISHED["qwen3"]
    config = translate(raw | {"rope_scaling": YARN})
    assert (config.yarn_rotary_scaling_factor, config.yarn_original_max_position_embeddings) == (4.0, 32768)
    assert (config.yarn_beta_fast, config.yarn_beta_slow) == (32.0, 1.0)
    assert config.yarn_correction_range_round_to_int
    assert math.isclose(config.rotary_magnitude, 0.1 * math.log(4) + 1)
    again = {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_theta": None}
    assert translate(raw | again) == translate(raw | again | {"rope_scaling": YARN}) == config
    short = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    assert translate(raw | {"rope_scaling": short}) == config, "the longest sequence is the original one then"
    asked = translate(raw | {"rope_scaling": YARN | {"attention_factor": 0.9, "beta_fast": None, "truncate": False}})
    assert math.isclose(asked.rotary_magnitude, 0.9)
    assert (asked.yarn_beta_fast, asked.yarn_correction_range_round_to_int) == (32.0, False)
    scaled = translate(raw | {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}})
    assert math.isclose(scaled.rotary_magnitude, (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    assert translate(raw | {"rope_scaling": YARN | {"mscale": 2.0}}) == config


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen2", {"layer_types": KINDS}, "layer_types has 'sliding_attention', and use_sliding_window is false"),
        ("qwen2", WINDOW | {"layer_types": KINDS[:1]}, "num_hidden_layers 2 contradicts the 1 layers of layer_types"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types = 'full_attention' .* must be a list"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": None, "layer_types": KINDS},
            "sliding_window = None is not supported",
        ),
        ("qwen3", {"use_sliding_window": "no"}, "use_sliding_window = 'no'"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers = -1"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0 is not supported"),
        ("qwen3_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than num_experts 128"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 1},
            "num_experts_per_tok = 1 is not supported with num_experts = 128; supported are 2 to 128",
        ),
        ("qwen3_moe", {"mlp_only_layers": [2]}, r"mlp_only_layers = \[2\]"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 .* num_local_experts = 8"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3", {"rope_scaling": YARN | {"factor": 0.5}}, r"rope_scaling.factor = 0.5 .* must be 1 or more"),
        ("qwen3", {"rope_scaling": YARN | {"beta_fast": -1}}, r"rope_scaling.beta_fast = -1"),
        ("qwen3", {"rope_scaling": YARN | {"truncate": "no"}}, r"rope_scaling.truncate = 'no'"),
        ("qwen3", {"rope_scaling": YARN | {"finetuned": True}}, r"rope_scaling.finetuned = True"),
        (
            "qwen3",
            {"rope_scaling": YARN | {"factor": 1, "attention_factor": 2.0}},
            r"rope_scaling.attention_factor = 2.0 is not supported; with rope_scaling.factor = 1",
        ),
        (
            "qwen3",
            {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}},
            r"rope_parameters .* contradicts rope_scaling",
        ),
        ("mixtral", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type = 'dynamic'"),
        ("mixtral", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config = "),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "architectures .*'Qwen3ForCausalLM'"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refused_by_name(name: str, changes: dict, named: str) -> None:
    """FA-2: the refusal is one line."""
    with pytest.raises(ConfigError, match=named) as caught:
        translate(PUBLISHED[name] | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_of_transformers(name: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(name, num_hidden_layers=2, architectures=PUBLISHED[name]["architectures"])
    found = translate(config.to_dict())
    assert found.layer_count == 4
    assert found.rotary_base == (1000000 if name == "mixtral" else 10000)
    config.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert read_hf_config(tmp_path) == found


MODEL = translate(PUBLISHED["qwen3"] | {"rope_scaling": YARN, "vocab_size": 100})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"add_attention_output_bias": True},
            "add_attention_output_bias is for attention with .* set add_qkv_bias too",
        ),
        ({"hybrid_override_pattern": "W-"}, r"pattern 'W-' has attention in a window \(W\): set attention_window"),
        ({"attention_window": 7}, r"attention_window 7 is for layers W, and pattern '\*-\*-' has none"),
        ({"hybrid_override_pattern": "W-", "attention_window": 0}, "attention-window 0 must be positive"),
        ({"yarn_rotary_scaling_factor": 0.5}, "--rotary-scaling-factor 0.5 must be at least 1"),
        ({"yarn_rotary_scaling_factor": math.nan}, "--rotary-scaling-factor nan must be at least 1"),
        ({"use_rope_scaling": True}, "needs --position-embedding-type rope, without --use-rope-scaling"),
        ({"position_embedding_type": "none"}, "needs --position-embedding-type rope"),
        ({"rotary_base": 1}, "needs a --rotary-base of more than 1"),
        ({"yarn_beta_slow": 33.0}, "yarn_beta_fast 32.0 and yarn_beta_slow 33.0"),
        ({"yarn_mscale": -10.0}, r"multiplies queries and keys by -0\.\d+, which must be more than zero"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(changes: dict, named: str) -> None:
    """Invalid settings of a saved checkpoint are refused, whichever program wrote it."""
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(MODEL, **changes)
