"""FA-2: a `config.json` of any family is translated whole, or refused by the name of the field."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import re
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig

from arguments.parser import parse_arguments
from megatron_ext import load_engine
from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.config.differences import EMBEDDED_MODEL_DIR
from megatron_ext.config.model import LAYER_SYMBOLS
from megatron_ext.config.model_fields import MULTIPLIERS
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.huggingface.family_registry import FAMILIES, family_of
from megatron_ext.models.huggingface.hf_checkpoint import read_hf_config, translate
from megatron_ext.models.load import load_model
from tests.on_request import long_except
from tests.unit_tests.models.test_untrusted_files import ODD, assert_short_lines, refusal

FILE = Path(__file__).with_name("published_configs.yaml")
MODEL_FIELDS = {field.name for field in dataclasses.fields(ModelConfig)}


def with_layers(raw: dict) -> dict:
    """Return the fields with each `layer_types` written out, also in the text model inside."""
    nested = {name: with_layers(value) for name, value in raw.items() if name == "text_config"}
    if not isinstance(raw.get("layer_types"), list):
        return raw | nested
    period = [kind for count, kind in raw["layer_types"] for _ in range(count)]
    return raw | nested | {"layer_types": list(itertools.islice(itertools.cycle(period), raw["num_hidden_layers"]))}


FOLDERS = {name: with_layers(raw) for name, raw in yaml.safe_load(FILE.read_text("utf-8")).items()}
QWEN3_5, QWEN3_5_MOE = FOLDERS["Qwen3.5-27B"], FOLDERS["Qwen3.5-35B-A3B"]
PUBLISHED = {raw["model_type"]: raw for raw in reversed(FOLDERS.values())}
PUBLISHED |= {kind["text_config"]["model_type"]: kind["text_config"] for kind in (QWEN3_5, QWEN3_5_MOE)}
DENSE_NEMOTRON, NEMOTRON = PUBLISHED["nemotron_h"], FOLDERS["NVIDIA Nemotron-3-Nano-30B-A3B"]
LLAMA = FOLDERS["Llama-3.2-1B-Instruct"]
LLAMA_2 = FOLDERS["Llama-2-7b-hf"]
GRANITE_MOE = FOLDERS["Granite-4.0-H-Small"]


@pytest.mark.parametrize("raw", FOLDERS.values(), ids=FOLDERS)
def test_published_folders_translate(raw: dict) -> None:
    config = translate(raw)
    text = raw.get("text_config", raw)
    sizes = {config.hidden_size, config.vocab_size}
    assert sizes == {text.get("hidden_size", text.get("block_dim", text.get("d_model"))), text["vocab_size"]}
    assert config.layer_count % text.get("num_hidden_layers", config.layer_count) == 0
    assert family_of(raw).unknown_fields(raw) == []


def test_every_family_is_published_in_several_ways() -> None:
    assert set(PUBLISHED) == set(FAMILIES)
    for origin in ("(Unsloth)", "(transformers.js)", "(from GGUF)"):
        assert sum(origin in name for name in FOLDERS) >= 2


def read(fields: dict) -> ModelConfig | str:
    """The model, or the message of the refusal."""
    try:
        return translate(fields)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fields_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Each field is known, by name; left out, it has transformers' default, or is named as missing."""
    config, others = AutoConfig.for_model(model_type), FAMILIES[model_type].fields.other_names
    raw = config.to_dict() | ({"layer_types": ["conv"] * 32} if model_type == "lfm2_moe" else {})  # without a default
    assert family_of(raw).unknown_fields(raw) == []
    text, expected = raw.get("text_config", {}), translate(raw)
    for name in (raw | text).keys() - {"model_type", "text_config"}:
        less = {key: value for key, value in raw.items() if key != name}
        if name in text:
            less["text_config"] = {key: value for key, value in text.items() if key != name}
        found = read(less)
        is_named = isinstance(found, str) and re.search(rf"field {others.get(name, name)}\b.* is missing", found)
        assert found == expected or is_named, (name, found)
    if model_type != "lfm2_moe":
        config.save_pretrained(tmp_path)
        assert read_hf_config(tmp_path) == expected


# What a family has instead of a number, a size or one of few values.
WRONG = {"sizes": (0, -1, "8", True, 1.5), "numbers": (0, -1.0, "small", True), "fixed": ("another", 7)}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_field_is_in_one_place_and_refused_by_name(model_type: str) -> None:
    """FA-2: in one line; what is translated becomes a field of ours."""
    family, raw = FAMILIES[model_type], PUBLISHED[model_type]
    table = family.fields
    together = [name for place in (table.sizes, table.numbers, table.fixed, table.read) for name in place]
    assert len(together) == len(set(together))
    assert set(table.defaults) | set(table.other_names.values()) <= table.known
    assert not set(table.other_names) & table.known
    ours = {*table.sizes.values(), *(name for name, _ in table.numbers.values()), *family.constants}
    needs = {source.needs for layer in family.tensors.layers.values() for source in layer.values()}
    assert ours | needs <= MODEL_FIELDS | {None}
    assert set(translate(raw).hybrid_override_pattern) <= set(family.tensors.layers) <= set(LAYER_SYMBOLS)
    for kind, values in WRONG.items():
        for name, value in itertools.product(getattr(table, kind), values):
            others = {other for other, present in table.other_names.items() if present == name}
            text = {key: one for key, one in raw.get("text_config", raw).items() if key not in others} | {name: value}
            with pytest.raises(ConfigError, match=rf"\b{name} = {value!r} (is not supported|is too large)") as caught:
                translate(raw | {"text_config": text} if "text_config" in raw else text)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", long_except([0], range(4)))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_any_value_of_a_known_field_gives_a_model_or_one_line(model_type: str, part: int) -> None:
    """SE-1: even of fields that the file lacks."""
    family, raw = FAMILIES[model_type], PUBLISHED[model_type]
    known = sorted(family.fields.known | set(family.fields.other_names))
    changes = ({name: value} for index, name in enumerate(known) for value in ODD[(index + part) % 4 :: 4])
    text = raw.get("text_config")
    changed = (raw | ({"text_config": text | one} if text else one) for one in changes)
    assert_short_lines([refusal(lambda fields=fields: translate(fields)) for fields in changed])


SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # as Qwen's model cards tell
WINDOW = {"use_sliding_window": True, "sliding_window": 1024}
KINDS = ["full_attention", "sliding_attention"]
TWO = {"num_hidden_layers": 2}
SPARSE = {"use_sliding_window": False, "sliding_window": None}
DELTA = {"linear_num_value_heads": 40}


def of(model_type: str, *removed: str, **changes: object) -> dict:
    """Published fields of a family, without some and with others."""
    return {name: value for name, value in (PUBLISHED[model_type] | changes).items() if name not in removed}


TRANSLATED = [
    (LLAMA_2 | {"num_key_value_heads": None}, {"query_groups": 32, "rotary_base": 10000, "use_rope_scaling": False}),
    (of("llama", rope_scaling=SCALED, rope_theta=5e5), {"use_rope_scaling": True, "rope_scaling_factor": 8.0}),
    (of("llama", "rope_scaling", rope_parameters=SCALED | {"factor": 32}), {"rope_scaling_factor": 32}),
    (LLAMA_2 | {"head_dim": 64}, {"head_channels": 64}),
    (LLAMA_2 | {"rope_scaling": {"type": "default"}}, {"rotary_base": 10000, "rotary_percent": 1.0}),
    (LLAMA_2 | {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": None}, {"rotary_base": 500000}),
    (of("qwen2", **TWO, **WINDOW), {"hybrid_override_pattern": "*-*-", "attention_window": None}),
    (of("qwen2", **TWO, **WINDOW, max_window_layers=1), {"hybrid_override_pattern": "*-W-", "attention_window": 1024}),
    (of("qwen3", **TWO, **WINDOW, max_window_layers=2, layer_types=KINDS), {"hybrid_override_pattern": "*-W-"}),
    (of("qwen3", **TWO, **WINDOW, max_window_layers=0), {"hybrid_override_pattern": "W-W-"}),
    (of("qwen2", **TWO, sliding_window=1024, use_sliding_window=False), {"hybrid_override_pattern": "*-*-"}),
    (of("qwen3_moe", **TWO, **WINDOW), {"hybrid_override_pattern": "WEWE", "attention_window": 1024}),
    (of("qwen3_moe", **TWO, decoder_sparse_step=2), {"hybrid_override_pattern": "*-*E"}),
    (of("mixtral", **TWO, sliding_window=4096), {"hybrid_override_pattern": "WEWE"}),
    (of("qwen3", rope_scaling=YARN), {"yarn_rotary_scaling_factor": 4.0, "yarn_beta_fast": 32.0}),
    (of("qwen3", rope_scaling=YARN | {"mscale": 2.0}), {"rotary_magnitude": 0.1 * math.log(4) + 1}),
    (of("qwen3", rope_scaling=YARN | {"attention_factor": 0.9, "beta_fast": None}), {"rotary_magnitude": 0.9}),
    (
        of("qwen3", rope_scaling=YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}),
        {"rotary_magnitude": (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)},
    ),
    (of("gpt_oss"), {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0, "softmax_type": "learnable"}),
    (of("gpt_oss", "layer_types", **TWO), {"hybrid_override_pattern": "WE*E", "attention_window": 128}),
    (NEMOTRON, {"moe_router_num_groups": None, "moe_router_topk": 6, "moe_router_topk_scaling_factor": 2.5}),
    (NEMOTRON | {"n_group": 8, "topk_group": 3}, {"moe_router_num_groups": 8, "moe_router_group_topk": 3}),
    (NEMOTRON | {"n_group": 8, "topk_group": 8}, {"moe_router_num_groups": None, "moe_router_group_topk": None}),
    (DENSE_NEMOTRON | {"mamba_hidden_act": "swish", "expand": 3}, {"squared_relu": True, "num_experts": None}),
    (of("qwen3_next", num_hidden_layers=4), {"hybrid_override_pattern": "MEMEME*E", "rotary_percent": 0.25}),
    (of("qwen3_next", num_hidden_layers=2, full_attention_interval=2), {"hybrid_override_pattern": "ME*E"}),
    (QWEN3_5 | {"tie_word_embeddings": True}, {"untie_embeddings_and_output_weights": False}),
    (QWEN3_5_MOE, {"moe_shared_expert_gate": True, "moe_router_pre_softmax": False}),
    (of("olmo_hybrid"), {"hybrid_override_pattern": "M-M-M-AF" * 2, "position_embedding_type": "none"}),
    (of("olmo_hybrid", "layer_types", num_hidden_layers=3), {"hybrid_override_pattern": "M-M-AF"}),
    (of("olmo_hybrid", "rope_parameters"), {"position_embedding_type": "rope", "rotary_base": 10000}),
    (of("mamba", "intermediate_size", "d_inner", time_step_rank="auto"), {"mamba_inner_size": 1536, "dt_rank": 48}),
    (of("falcon_mamba"), {"mamba_channels": 8192, "mamba_inner_norm": "plain", "inner_norm_epsilon": 1e-6}),
    (of("jamba"), {"hybrid_override_pattern": "M-MEM-ME*-MEM-ME" * 4, "moe_router_pre_softmax": True}),
    (of("mamba2", norm_before_gate=False), {"hybrid_override_pattern": "M" * 64, "mamba_head_dim": 64}),
    (of("bamba", mamba_d_head="auto"), {"mamba_head_dim": 64, "rotary_percent": 0.5}),
    (
        of("bamba", attn_rotary_emb=32, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        {"rotary_percent": 0.25},
    ),
    (of("granitemoehybrid", position_embedding_type="rope"), {"position_embedding_type": "rope", "ffn_size": 4096}),
    (GRANITE_MOE, {"logits_multiplier": 1 / 16, "expert_ffn_size": 768, "moe_shared_expert_intermediate_size": 1536}),
    (of("lfm2", block_ff_dim=6656, intermediate_size=6656), {"ffn_size": 4608}),
    (of("lfm2", block_ff_dim=12288, intermediate_size=12288, block_ffn_dim_multiplier=1.5), {"ffn_size": 12288}),
    (of("lfm2_moe"), {"hybrid_override_pattern": "M-M-*EME", "moe_router_enable_expert_bias": True, "ffn_size": 7168}),
    (of("falcon_h1", mamba_d_ssm=None, mamba_n_heads=32, mamba_rms_norm=True), {"mamba_gated_norm": "gate_first"}),
    # Attention is linear in its values: factors before it become factors after it.
    (of("falcon_h1", attention_in_multiplier=2.0), {"softmax_scale": 4 / 8, "attention_output_multiplier": 2.0}),
]


@pytest.mark.parametrize(("raw", "expected"), TRANSLATED, ids=lambda one: str(one)[-60:])
def test_translated(raw: dict, expected: dict) -> None:
    """FA-2, FA-4: fields with a meaning of their own; the logits of test_against_transformers.py prove the others."""
    config = translate(raw)
    assert {name: getattr(config, name) for name in expected} == {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in expected.items()
    }


REFUSED = [
    (LLAMA, {"model_type": "t5"}, "model_type 't5' is not supported; supported are 'nemotron_h' .*, 'llama'"),
    (LLAMA, {"model_type": ["llama"]}, "model_type .* is not supported"),
    (LLAMA, {"format": "megatron_ext"}, "that this package saved; give --load"),
    (LLAMA, {"architectures": ["LlamaModel"]}, "architectures .* supported is 'LlamaForCausalLM'"),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*--cpu-weight-quantization"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    (LLAMA, {"num_hidden_layers": 3_000_000}, "num_hidden_layers = 3000000 is too large; at most 4096 is supported"),
    (LLAMA, {"tie_word_embeddings": None}, "tie_word_embeddings = None"),
    (LLAMA, {"head_dim": 63}, "head_dim = 63 is not supported; rotary embeddings need an even number"),
    (LLAMA_2, {"num_attention_heads": 24, "num_key_value_heads": 24}, "24 .* must divide hidden_size = 4096"),
    (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads = 5 .* must divide num_attention_heads = 32"),
    (LLAMA, {"attention_bias": "yes"}, "attention_bias = 'yes'"),
    (LLAMA, {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
    (LLAMA_2, {"rope_scaling": SCALED | {"high_freq_factor": 5.0}}, "rope_scaling.high_freq_factor = 5.0"),
    (LLAMA_2, {"rope_scaling": SCALED | {"factor": None}}, "rope_scaling.factor = None"),
    (
        LLAMA_2,
        {"rope_scaling": SCALED, "rope_parameters": SCALED | {"factor": 32.0}},
        "rope_parameters .*32.0.* contradicts rope_scaling .*8.0",
    ),
    (LLAMA_2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type = 'linear'"),
    (LLAMA_2, {"rope_scaling": {"type": "default", "rope_type": "yarn"}}, "'yarn' contradicts rope_type 'default'"),
    (LLAMA_2, {"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor = 2.0"),
    (LLAMA_2, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention = "),
    (LLAMA_2, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor = 0.5"),
    (LLAMA_2, {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "500000.0 contradicts rope_parameters.rope"),
    (LLAMA_2, {"rope_parameters": [1e4]}, r"rope_parameters = \[10000.0\] is not supported; it must be an object"),
    (LLAMA_2, {"rope_theta": 10000.5}, "rope_theta = 10000.5 is not supported; it must be a whole number"),
    (of("qwen2"), {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config = "),
    (of("qwen2", **TWO), SPARSE | {"layer_types": KINDS}, "'sliding_attention', and use_sliding_window is false"),
    (of("qwen2", **TWO), WINDOW | {"layer_types": KINDS[:1]}, "num_hidden_layers 2 contradicts the 1 layers of"),
    (of("qwen3", **TWO), {"layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention'"),
    (of("qwen3"), {"layer_types": "full_attention"}, "layer_types = 'full_attention' .* must be a list"),
    (of("qwen2"), {"max_window_layers": -1}, "max_window_layers = -1"),
    (of("mistral"), {"sliding_window": 0}, "sliding_window = 0 is not supported"),
    (of("qwen3_moe"), {"num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than num_experts 128"),
    (of("qwen3_moe"), {"num_experts_per_tok": 1}, "= 1 is not supported with num_experts = 128; supported are 2 to"),
    (of("qwen3_moe"), {"mlp_only_layers": [48]}, r"mlp_only_layers = \[48\] .* a list of layers, 0 to 47"),
    (of("qwen3"), {"rope_scaling": YARN | {"factor": 0.5}}, r"rope_scaling.factor = 0.5 .* must be 1 or more"),
    (of("qwen3"), {"rope_scaling": YARN | {"beta_fast": -1}}, r"rope_scaling.beta_fast = -1"),
    (of("qwen3"), {"rope_scaling": YARN | {"truncate": "no"}}, r"rope_scaling.truncate = 'no'"),
    (of("qwen3"), {"rope_scaling": YARN | {"slope": 2}}, r"rope_scaling.slope = 2"),
    (of("qwen3"), {"rope_scaling": YARN | {"factor": 1, "attention_factor": 2.0}}, r"rope_scaling.factor = 1 supp"),
    (of("qwen3"), {"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "contradicts rope_scaling"),
    (of("gpt_oss"), {"sliding_window": None}, "layer_types has 'sliding_attention', and sliding_window is null"),
    (NEMOTRON, {"layers_block_type": ["mamba", "conv"]}, "layers_block_type has 'conv'"),
    (NEMOTRON, {"layers_block_type": ["mamba"]}, "hybrid_override_pattern '.*' contradicts layers_block_type 'M'"),
    (NEMOTRON, {"hybrid_override_pattern": "M|-"}, "hybrid_override_pattern 'M|-' is not supported"),
    (NEMOTRON, {"hybrid_override_pattern": "", "num_hidden_layers": 0}, "hybrid pattern is empty"),
    (NEMOTRON, {"num_hidden_layers": 6}, "num_hidden_layers 6"),
    (NEMOTRON, {"time_step_limit": [0.001, {"__float__": "Infinity"}]}, "time_step_limit"),
    (DENSE_NEMOTRON, {"mamba_dt_limit": [0.0, 0.1]}, "mamba_dt_limit .* contradicts time_step_limit"),
    (NEMOTRON, {"n_groups": 7}, "n_groups = 7 .* must divide mamba_num_heads = 64"),
    (NEMOTRON, {"norm_topk_prob": False}, "norm_topk_prob = False is not supported with num_experts_per_tok = 6"),
    (NEMOTRON, {"num_experts_per_tok": 1}, "norm_topk_prob = True is not supported with num_experts_per_tok = 1"),
    (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts = 2 is not supported; supported is 1"),
    (NEMOTRON, {"n_group": 8, "topk_group": 2}, "n_group = 8 with topk_group = 2 .* num_experts_per_tok = 6"),
    (NEMOTRON, {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 3}, "n_group = 2 with topk_group = 1 .* = 3"),
    (NEMOTRON, {"n_group": 3}, "n_group = 3 .* must divide n_routed_experts = 128"),
    (NEMOTRON, {"n_group": 2, "topk_group": 3}, "n_group = 2 with topk_group = 3"),
    (NEMOTRON, {"num_local_experts": 64}, "num_local_experts 64 contradicts n_routed_experts 128|n_routed_experts 128"),
    (of("qwen3_next"), {"partial_rotary_factor": ""}, "partial_rotary_factor = '' .* it must be a positive number"),
    (of("qwen3_next"), {"rope_parameters": {"partial_rotary_factor": 2.0}}, "rotary-percent 2.0|contradicts"),
    (of("qwen3_next"), DELTA | {"linear_num_key_heads": 16}, "linear_num_key_heads = 16 .*; it must divide"),
    (QWEN3_5, {"text_config": None}, "text_config = None is not supported; it must be an object"),
    (QWEN3_5, {"text_config": QWEN3_5_MOE["text_config"]}, "text_config.model_type = 'qwen3_5_moe_text' is not"),
    (
        QWEN3_5,
        {"text_config": QWEN3_5["text_config"] | {"tie_word_embeddings": True}, "tie_word_embeddings": False},
        "= True contradicts tie_word_emb",
    ),
    (of("olmo_hybrid"), {"rope_theta": 5e5}, "rope_parameters.rope_theta = None contradicts rope_theta"),
    (of("olmo_hybrid"), {"linear_num_value_heads": 31}, "linear_num_key_heads = 30 .*; it must divide"),
    (of("mamba"), {"intermediate_size": 1000}, "intermediate_size 1000 contradicts|contradicts intermediate_size"),
    (of("mamba"), {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg"),
    (of("mamba2"), {"head_dim": 32}, "num_heads = 128 of head_dim = 32 do not make up the 8192 channels"),
    (of("jamba"), {"attn_layer_offset": 8}, "attn_layer_offset = 8 .* less than attn_layer_period = 8"),
    (of("bamba"), {"attn_layer_indices": [32]}, r"attn_layer_indices = \[32\] is not supported; .* layers, 0 to 31"),
    (of("bamba"), {"mamba_n_heads": 100}, "mamba_n_heads = 100 of mamba_d_head = 64 do not make up the 8192"),
    (GRANITE_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported .*; supported are 2 to 72"),
    (GRANITE_MOE, {"logits_scaling": 0}, "logits_scaling = 0 is not supported; it must be a positive number"),
    (of("falcon_h1"), {"ssm_multipliers": [1.0]}, r"ssm_multipliers = \[1.0\] .* list of 5 positive numbers"),
    (of("falcon_h1"), {"mlp_multipliers": [1.0, 0]}, "mlp_multipliers = 0 is not supported; it must be a positive"),
    (of("falcon_h1"), {"mamba_d_ssm": 769}, "do not make up the 769 channels"),
    (of("lfm2"), {"full_attn_idxs": [1]}, r"full_attn_idxs = \[1\] contradicts layer_types"),
    (of("lfm2"), {"conv_dim": 1024}, "contradicts hidden_size|hidden_size .* contradicts"),
    (of("lfm2_moe"), {"num_dense_layers": 5}, "num_dense_layers = 5 is not supported; it must be 0 to 4"),
    (of("lfm2_moe"), {"norm_topk_prob": False}, "norm_topk_prob = False .* with num_experts_per_tok = 4"),
]


@pytest.mark.parametrize(("published", "changes", "message"), REFUSED, ids=lambda value: str(value)[-50:])
def test_refused_by_name(published: dict, changes: dict, message: str) -> None:
    """FA-2: unsupported fields are refused by name and value, in one line."""
    translate(published)
    with pytest.raises(ConfigError, match=message) as caught:
        translate(published | changes)
    assert "\n" not in str(caught.value)


SENSELESS = [
    *(({name: 0.0}, f"{name} 0.0 must be more than 0") for name in MULTIPLIERS),
    ({"softmax_scale": math.nan}, "softmax_scale nan must be more than 0"),
    ({"mlp_gate_multiplier": 2.0, "swiglu": False}, "mlp_gate_multiplier 2.0 is for gated MLPs; give --swiglu"),
    ({"qk_layernorm_over_heads": True, "qk_layernorm": False}, "qk_layernorm_over_heads needs --qk-layernorm"),
    ({"mamba_gated_norm": "last"}, "mamba_gated_norm 'last' is unknown; one of gate_first, norm_first"),
    ({"mamba_multipliers": (1.0, 2.0)}, "must be five numbers above zero, for z, x, B, C and dt"),
    ({"linear_norm_epsilon": 0.0}, "linear_norm_epsilon 0.0 must be more than 0"),
    ({"activation_func_clamp_value": 0.0}, "--activation-func-clamp-value 0.0 must be more than 0"),
    ({"softmax_type": "sink"}, "--softmax-type 'sink' is unknown; one of vanilla, learnable"),
    ({"moe_router_score_function": "tanh"}, "--moe-router-score-function 'tanh' is unknown; one of softmax, sigmoid"),
    ({"recurrent_layer": "short_conv", "short_conv_kernel_dim": 1}, "--short-conv-kernel-dim 1 must be between 2 and"),
    ({"hybrid_override_pattern": "PQ"}, r"has unknown letter 'Q'; known are .* P \(attention and recurrent side by"),
    ({"add_qkv_bias": False, "add_attention_output_bias": True}, "add_attention_output_bias is for .* add_qkv_bias to"),
    ({"hybrid_override_pattern": "W-"}, r"pattern 'W-' has attention in a window \(W\): set attention_window"),
    ({"attention_window": 7}, r"attention_window 7 is for layers W, and pattern '\*-\*-' has none"),
    ({"hybrid_override_pattern": "W-", "attention_window": 0}, "attention-window 0 must be positive"),
    ({"yarn_rotary_scaling_factor": math.nan}, "--rotary-scaling-factor nan must be at least 1"),
    ({"use_rope_scaling": True}, "needs --position-embedding-type rope, without --use-rope-scaling"),
    ({"position_embedding_type": "none"}, "needs --position-embedding-type rope"),
    ({"rotary_base": 1}, "needs a --rotary-base of more than 1"),
    ({"yarn_beta_slow": 33.0}, "yarn_beta_fast 32.0 and yarn_beta_slow 33.0"),
    ({"yarn_mscale": -10.0}, r"multiplies queries and keys by -0\.\d+, which must be more than zero"),
]


@pytest.mark.parametrize(("settings", "message"), SENSELESS, ids=str)
def test_settings_that_make_no_sense_are_refused(settings: dict, message: str) -> None:
    """SE-1: whichever program wrote them into a checkpoint."""
    model = translate(of("qwen3", **TWO, rope_scaling=YARN, vocab_size=100))
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(model, **settings)


# Files


def test_no_configuration(tmp_path: Path) -> None:
    for content, message in ((None, r"has no config\.json"), ("{", "cannot be read"), ("[]", "holds no JSON object")):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            read_hf_config(tmp_path)


UNKNOWN = {"colour": "red", "attention_sinks": 4, "_private": 1, "empty": [], "other_token_id": 5}


def test_unknown_fields_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | UNKNOWN))
    for _ in range(2):
        assert read_hf_config(tmp_path) == translate(LLAMA)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.endswith("config.json: unknown fields, which are ignored: attention_sinks, colour")


def test_fields_above_those_of_the_text_model_are_named() -> None:
    """`--hf-overrides` there would have no effect."""
    changes = {"hidden_size": 64, "vocab_size": QWEN3_5["text_config"]["vocab_size"], "colour": "red"}
    assert family_of(QWEN3_5).unknown_fields(QWEN3_5 | changes) == ["colour", "hidden_size"]


def test_a_model_with_overrides(tmp_path: Path) -> None:
    """The changed file decides on fields, family and weights, on the command line and in Python."""
    for file in EMBEDDED_MODEL_DIR.glob("*"):
        if file.is_file() and file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    raw = json.loads((EMBEDDED_MODEL_DIR / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "llama", "quantization_config": {"bits": 4}}))
    changes = {"model_type": raw["model_type"], "quantization_config": None, "max_position_embeddings": 333}
    settings = parse_arguments(["--load-hf", str(tmp_path), "--hf-overrides", json.dumps(changes)])
    assert load_model(settings.source, {}).config.max_position_embeddings == 333
    pools = {"inference_dynamic_batching_block_count": 20, "inference_dynamic_batching_prefix_caching_mamba_slots": 2}
    with load_engine(load_hf=str(tmp_path), hf_overrides=changes, num_tokens_to_generate=2, **pools) as engine:
        assert engine.generate("def f():")[0].generated_tokens
    with pytest.raises(ConfigError, match="architectures"):
        load_model(SourceConfig(load_hf=str(tmp_path)), {})
