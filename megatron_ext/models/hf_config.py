"""The architecture of a Hugging Face NemotronH checkpoint: its `config.json` as a `ModelConfig`.

Everything that could change the logits is either translated or refused by its name. Two fields deserve a word:

- `time_step_limit` clamps dt after softplus. megatron-core does not clamp, so only (0, inf), which every published
  checkpoint has, is accepted.
- `time_step_min`, `time_step_max` and `time_step_floor` say how dt's bias is drawn before training and are ignored.
  transformers (5.23) is at odds with itself here: its chunk path clamps dt at `time_step_min` whatever
  `time_step_limit` says, its one-token path does not clamp. The models were trained without a clamp: so we run them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_ext.config import ModelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.hf_fields import check_divides, flag, size
from megatron_ext.models.hf_moe import MOE_FIELDS, translate_moe
from megatron_ext.models.weight_files import read_json

MODEL_TYPE = "nemotron_h"
ARCHITECTURE = "NemotronHForCausalLM"
_SUPPORTED = f"supported is model_type {MODEL_TYPE!r}, architecture {ARCHITECTURE!r}"

_OTHER_NAMES = {
    "attention_head_dim": "head_dim",
    "layer_types": "layers_block_type",
    "mamba_chunk_size": "chunk_size",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_n_groups": "n_groups",
    "norm_eps": "layer_norm_epsilon",
    "num_local_experts": "n_routed_experts",
    "rms_norm_eps": "layer_norm_epsilon",
}

# Positive integers, under their names in `ModelConfig`.
_SIZES = {
    "chunk_size": "mamba_chunk_size",
    "conv_kernel": "mamba_conv_kernel",
    "head_dim": "kv_channels",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_num_heads": "mamba_num_heads",
    "max_position_embeddings": "max_position_embeddings",
    "n_groups": "mamba_num_groups",
    "num_attention_heads": "num_attention_heads",
    "ssm_state_size": "mamba_state_dim",
    "vocab_size": "vocab_size",
}

# Only these values are supported; a field that is absent has the first one.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "mamba_proj_bias": (False,),
    "use_conv_bias": (True,),
    "mlp_hidden_act": ("relu2",),
    "hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu", "swish"),
    "time_step_limit": ((0.0, math.inf),),
    "sliding_window": (None,),
    "rope_scaling": (None,),
    "rope_parameters": (None,),
    "residual_in_fp32": (False,),
    "num_nextn_predict_layers": (0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
}

_LAYER_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}

# Translated below, one by one.
_TRANSLATED = frozenset(
    {
        "architectures",
        "hybrid_override_pattern",
        "layer_norm_epsilon",
        "layers_block_type",
        "model_type",
        "num_hidden_layers",
        "num_key_value_heads",
        "tie_word_embeddings",
    }
)

# What the logits do not depend on: how weights were drawn, what training and generation are told, hints to servers,
# names and versions; and the width factor `expand`, since heads times head size decides. NemotronH attention has no
# rotary embedding, though some files carry its base.
_WITHOUT_EFFECT = frozenset(
    """
    expand mamba_expand initializer_range rescale_prenorm_residual attention_dropout hidden_dropout
    time_step_min time_step_max time_step_floor mamba_dt_min mamba_dt_max mamba_dt_init_floor
    rope_theta partial_rotary_factor use_mamba_kernels mamba_ssm_cache_dtype num_logits_to_keep use_cache
    moe_shared_expert_overlap output_router_logits mtp_layers_block_type mtp_hybrid_override_pattern
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id
    auto_map dtype torch_dtype transformers_version _name_or_path name_or_path tokenizer_class
    return_dict output_attentions output_hidden_states id2label label2id problem_type finetuning_task
    task_specific_params _attn_implementation _attn_implementation_autoset
    """.split()
)


def read_hf_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in a directory.

    Raises:
        CheckpointError: No `config.json`, or one that is not JSON.
        ConfigError: It asks for what is not supported; the message names the field.
    """
    return translate(read_json(directory / "config.json"))


def translate(raw: dict[str, Any]) -> ModelConfig:
    """A decoded `config.json` as a `ModelConfig`.

    Raises:
        ConfigError: A field is missing, unknown, or has a value that is not supported.
    """
    _check_family(raw)
    fields = _with_present_names(raw)
    _check_known(fields)
    _check_fixed(fields)
    pattern = _pattern(fields)
    query_heads = size(fields, "num_attention_heads")
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] is None:  # transformers: as many as queries
        fields["num_key_value_heads"] = query_heads
    key_value_heads = size(fields, "num_key_value_heads")
    check_divides(fields, "num_key_value_heads", "num_attention_heads")
    check_divides(fields, "n_groups", "mamba_num_heads")
    return ModelConfig(
        **{ours: size(fields, theirs) for theirs, ours in _SIZES.items()},
        hybrid_override_pattern=pattern,
        group_query_attention=key_value_heads != query_heads,
        num_query_groups=key_value_heads,
        norm_epsilon=_epsilon(fields),
        untie_embeddings_and_output_weights=not flag(fields, "tie_word_embeddings", default=False),
        position_embedding_type="none",
        normalization="RMSNorm",
        squared_relu=True,
        swiglu=False,
        disable_bias_linear=True,
        **(translate_moe(fields) if "E" in pattern else {}),
    )


def _check_family(raw: dict[str, Any]) -> None:
    if raw.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"config.json: model_type {raw.get('model_type')!r} is not supported; {_SUPPORTED}")
    architectures = raw.get("architectures")
    if architectures not in (None, [ARCHITECTURE]):
        raise ConfigError(f"config.json: architectures {architectures!r} is not supported; {_SUPPORTED}")


def _with_present_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields under today's names, with special floats decoded; a field given twice must say the same twice."""
    fields: dict[str, Any] = {}
    for given_name, encoded in raw.items():
        name, value = _OTHER_NAMES.get(given_name, given_name), _decoded(encoded)
        if name in fields and fields[name] != value:
            raise ConfigError(f"config.json: {given_name} {value!r} contradicts {name} {fields[name]!r}")
        fields[name] = value
    return fields


def _decoded(value: Any) -> Any:
    """Infinity is {"__float__": "Infinity"} in what transformers 5 writes."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        return float(value["__float__"])
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value


def _check_known(fields: dict[str, Any]) -> None:
    known = set(_SIZES) | set(_FIXED) | _TRANSLATED | _WITHOUT_EFFECT | MOE_FIELDS
    for name in sorted(set(fields) - known):
        value = fields[name]
        if value not in (None, False, 0) and value not in ([], {}, ""):
            raise ConfigError(
                f"config.json: field {name} = {value!r} is not supported; take it out if the logits do not depend on it"
            )


def _check_fixed(fields: dict[str, Any]) -> None:
    for name, supported in _FIXED.items():
        value = fields.get(name, supported[0])
        comparable = tuple(value) if isinstance(value, list) else value
        if not any(comparable == option and _is_bool(comparable) == _is_bool(option) for option in supported):
            wanted = " or ".join(repr(option) for option in supported)
            raise ConfigError(f"config.json: {name} = {value!r} is not supported; supported is {wanted}")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _epsilon(fields: dict[str, Any]) -> float:
    value = fields.get("layer_norm_epsilon", ModelConfig.norm_epsilon)
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: layer_norm_epsilon = {value!r} is not supported; it must be a positive number")
    return value


def _pattern(fields: dict[str, Any]) -> str:
    """One letter a layer, from the list of layer types, the pattern, or both if they agree."""
    listed, pattern = fields.get("layers_block_type"), fields.get("hybrid_override_pattern")
    if listed is None and pattern is None:
        raise ConfigError("config.json: field layers_block_type (or hybrid_override_pattern) is missing")
    source = "hybrid_override_pattern" if listed is None else "layers_block_type"
    letters = pattern if listed is None else _listed_letters(listed)
    if not isinstance(letters, str) or set(letters) - set("M*-E"):
        raise ConfigError(
            f"config.json: {source} {letters!r} is not supported; supported are the letters M, *, - and E"
        )
    if pattern not in (None, letters):
        raise ConfigError(f"config.json: hybrid_override_pattern {pattern!r} contradicts layers_block_type {letters!r}")
    count = fields.get("num_hidden_layers", len(letters))
    if count != len(letters):
        raise ConfigError(f"config.json: num_hidden_layers {count!r} contradicts the {len(letters)} layers of {source}")
    return letters


def _listed_letters(listed: Any) -> str:
    if not isinstance(listed, list):
        raise ConfigError(f"config.json: layers_block_type = {listed!r} is not supported; it must be a list")
    for kind in listed:
        if not isinstance(kind, str) or kind not in _LAYER_LETTERS:
            known = ", ".join(_LAYER_LETTERS)
            raise ConfigError(f"config.json: layers_block_type has {kind!r}, not supported; known are {known}")
    return "".join(_LAYER_LETTERS[kind] for kind in listed)
