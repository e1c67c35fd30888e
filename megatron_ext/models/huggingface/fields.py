"""Fields of a decoded `config.json` of any family: harmless ones, and checks of the others by name."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from pathlib import Path

from megatron_ext.config import LARGEST_SIZE, MAX_LAYERS
from megatron_ext.config.source import HfOverrides
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json

CONFIG_FILE = "config.json"

Fields = Mapping[str, object]  # of a decoded `config.json`, or `ModelConfig`


def read_fields(directory: Path, overrides: HfOverrides | None = None) -> Fields:
    """Read the `config.json` in a directory, with `--hf-overrides`.

    Raises:
        CheckpointError: No `config.json`, or one that is not JSON.
    """
    raw = read_json(directory / CONFIG_FILE)
    return raw if overrides is None else overrides.over(raw)


def names(text: str) -> frozenset[str]:
    """Return the names of fields in a text separated by white space."""
    return frozenset(text.split())


# Fields that change no logits in any family whose table does not list them: initialization and training, outputs other
# than logits, generation, kernels and their caches, other modalities, names and versions.
WITHOUT_EFFECT = names(
    """
    initializer_range init_method A_initializer_range conv_initializer_range emb_initializer_range
    rescale_prenorm_residual block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init
    time_step_min time_step_max time_step_floor time_step_rank time_step_scale time_step_init_scheme
    mamba_dt_min mamba_dt_max mamba_dt_init_floor
    linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor
    attention_dropout hidden_dropout neftune_noise_alpha gradient_checkpointing use_reentrant_checkpointing
    router_aux_loss_coef router_jitter_noise z_loss_coefficient
    return_dict output_attentions output_hidden_states output_router_logits num_logits_to_keep
    calc_logits_for_entire_prompt id2label label2id problem_type finetuning_task task_specific_params
    do_sample temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty num_beams
    num_beam_groups num_return_sequences max_new_tokens max_length min_length model_max_length
    use_cache use_mamba_kernels use_mambapy use_falcon_mambapy use_associative_scan use_triton_kernels fused_add_norm
    mamba_ssm_cache_dtype mamba_ssm_dtype moe_shared_expert_overlap torchscript use_bfloat16
    norm_before_gate mlp_expansion_factor max_window_layers initial_context_length pad_vocab_size_multiple
    vision_config audio_config language_model_only
    auto_map dtype torch_dtype transformers_version name_or_path model_name tokenizer_class license internal_version
    unsloth_version unsloth_fixed is_llama_config transformers.js_config
    """
)
_HARMLESS_NAME = re.compile(r"_.*|.*_token_(id|ids|index)")

_FLOATS = ("Infinity", "-Infinity", "NaN")  # in the spelling of transformers 5
_LARGEST_NUMBER = 1e300


def check_architecture(raw: Fields, architecture: str) -> None:
    """Raise if a model class is given and is not `architecture`, which generates text."""
    architectures = raw.get("architectures")
    if architectures not in (None, [architecture]):
        raise ConfigError(
            f"config.json: architectures {architectures!r} is not supported; supported is {architecture!r} "
            f"of model_type {raw.get('model_type')!r}"
        )


def with_present_names(raw: Fields, other_names: Mapping[str, str]) -> dict[str, object]:
    """Return fields under their present names, with special floats decoded; a field given twice must be equal."""
    fields: dict[str, object] = {}
    for given_name, encoded in raw.items():
        name, value = other_names.get(given_name, given_name), _decoded(encoded)
        if name in fields and fields[name] != value:
            raise ConfigError(f"config.json: {given_name} {value!r} contradicts {name} {fields[name]!r}")
        fields[name] = value
    return fields


def _decoded(value: object) -> object:
    """Decode infinity: {"__float__": "Infinity"} of transformers 5, or a number such as 1e308 of strict JSON."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        name = value["__float__"]
        if name not in _FLOATS:
            raise ConfigError(f"config.json: __float__ {name!r} is unknown; one of {', '.join(_FLOATS)}")
        return float(name)
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if isinstance(value, float) and value > _LARGEST_NUMBER:
        return math.inf
    return value


def unknown_names(fields: Fields, known: Container[str]) -> list[str]:
    """Return the names of fields that are neither known nor harmless, and not empty, null, false or zero."""
    return sorted(
        name
        for name, value in fields.items()
        if value and name not in known and name not in WITHOUT_EFFECT and not _HARMLESS_NAME.fullmatch(name)
    )


REMEDIES = {
    "quantization_config": "; give the folder of the weights that were quantized (on CPUs --cpu-weight-quantization "
    "int8 quantizes them here)",
}
"""Remedies for values that are not supported, by field."""


def check_fixed(fields: Fields, fixed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise unless fields with few supported values have one of them; an absent field has the first."""
    for name, supported in fixed.items():
        value = fields.get(name, supported[0])
        comparable = tuple(value) if isinstance(value, list) else value
        if not any(comparable == option and _is_bool(comparable) == _is_bool(option) for option in supported):
            wanted = " or ".join(repr(option) for option in supported)
            raise ConfigError(
                f"config.json: {name} = {value!r} is not supported; supported is {wanted}{REMEDIES.get(name, '')}"
            )


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def require_field(fields: Fields, name: str) -> object:
    """Return a required field."""
    if name not in fields:
        raise ConfigError(f"config.json: field {name} is missing")
    return fields[name]


def size(fields: Fields, name: str) -> int:
    """Return a required positive integer, at most LARGEST_SIZE."""
    value = require_field(fields, name)
    if type(value) is not int or value <= 0:
        raise ConfigError(f"config.json: {name} = {value!r} is not supported; it must be a positive integer")
    if value > LARGEST_SIZE:
        raise ConfigError(f"config.json: {name} = {value!r} is too large; at most {LARGEST_SIZE} is supported")
    return value


def layer_count(fields: Fields) -> int:
    """Return the number of decoder layers."""
    count = size(fields, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise ConfigError(f"config.json: num_hidden_layers = {count} is too large; at most {MAX_LAYERS} is supported")
    return count


def size_or(fields: Fields, name: str, default: int) -> int:
    """Return a positive integer; the default if it is null or absent."""
    return default if fields.get(name) is None else size(fields, name)


def check_divides(fields: Fields, divisor: str, dividend: str) -> None:
    """Raise unless one size divides another."""
    small, large = size(fields, divisor), size(fields, dividend)
    if large % small:
        raise ConfigError(f"config.json: {divisor} = {small} is not supported; it must divide {dividend} = {large}")


def flag(fields: Fields, name: str, *, default: bool) -> bool:
    """Return a boolean field."""
    value = fields.get(name, default)
    if type(value) is not bool:
        raise ConfigError(f"config.json: {name} = {value!r} is not supported; it must be true or false")
    return value


def positive_number(fields: Fields, name: str, *, default: float | None = None) -> float:
    """Return a number above zero, whole or not; required if there is no default."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_NUMBER:
        raise ConfigError(f"config.json: {name} = {value!r} is not supported; it must be a positive number")
    return float(value)
