"""Attention in a decoded `config.json` of any family: heads, rotary embeddings and YaRN.

Rotary parameters are in the format of transformers 5 or of older files.
"""

from __future__ import annotations

import math

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, names, with_present_names


def attention_heads(fields: Fields) -> dict[str, object]:
    """Return head fields of `ModelConfig`; a missing or null `num_key_value_heads` means the query heads.

    Raises:
        ConfigError: The key/value heads do not divide the query heads.
    """
    query_heads = fields.size("num_attention_heads")
    key_value_heads = fields.size("num_key_value_heads", query_heads)
    if fields.get("num_key_value_heads") is not None:
        fields.check_divides("num_key_value_heads", "num_attention_heads")
    return {"group_query_attention": key_value_heads != query_heads, "num_query_groups": key_value_heads}


def rotated_head_size(fields: Fields) -> dict[str, object]:
    """Return `kv_channels` of rotated heads: `head_dim`, or an equal share of the hidden size.

    Raises:
        ConfigError: The share is not a whole number, or the channels are odd.
    """
    if fields.get("head_dim") is None:
        fields.check_divides("num_attention_heads", "hidden_size")
    channels = fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    if channels % 2:
        raise ConfigError(f"config.json: head_dim = {channels} is not supported; rotary embeddings need an even number")
    return {"kv_channels": channels}


YARN = "yarn"
YARN_KEYS = names(
    """
    factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate
    """
)
# transformers' defaults of null, zero or absent values; also ours.
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def yarn_fields(parameters: Fields, name: str, fields: Fields) -> dict[str, object]:
    """Return the fields of `ModelConfig` that begin with `yarn_`.

    Args:
        parameters: Rotary parameters, each key with the object's name as prefix: `rope_scaling.factor`.
        fields: The whole file; its maximum length is the default of the original one.

    Raises:
        ConfigError: A value has the wrong type or range.
    """
    key = f"{name}.original_max_position_embeddings"
    factor = parameters.number(f"{name}.factor")
    if factor < 1:
        parameters.refuse(f"{name}.factor", "it must be 1 or more")
    return {
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": parameters.size(key, fields.size("max_position_embeddings")),
        **{f"yarn_{beta}": _number_or(parameters, f"{name}.{beta}", default) for beta, default in _BETAS.items()},
        "yarn_correction_range_round_to_int": parameters.flag(f"{name}.truncate", default=True),
        **_scales(parameters, name, factor),
    }


def _number_or(parameters: Fields, key: str, default: float) -> float:
    return parameters.number(key) if parameters.get(key) else default


def _scales(parameters: Fields, name: str, factor: float) -> dict[str, object]:
    """Return two scales that yield the requested magnitude, see `ModelConfig.rotary_magnitude`."""
    magnitude, both = f"{name}.attention_factor", (f"{name}.mscale", f"{name}.mscale_all_dim")
    if parameters.get(magnitude) is not None:
        asked = parameters.number(magnitude)
        if factor == 1 and asked != 1:
            parameters.refuse(magnitude, f"with {name}.factor = 1 supported is 1")
        scale = (asked - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0
        return {"yarn_mscale": scale, "yarn_mscale_all_dim": 0.0}
    if not all(parameters.get(key) for key in both):
        return {}
    numerator, denominator = (parameters.number(key) for key in both)
    return {"yarn_mscale": numerator, "yarn_mscale_all_dim": denominator}


# Either object may have all parameters; the base may also be a top-level field.
_OBJECTS = ("rope_parameters", "rope_scaling")
ROPE_FIELDS = frozenset(("rope_theta", *_OBJECTS))
_NAMES = {"type": "rope_type"}
_FIXED: dict[str, tuple[object, ...]] = {"rope_type": ("default", "llama3", YARN)}
SHARE = "partial_rotary_factor"
# Parameters of Llama 3.1 and later; megatron-core uses these values regardless of a configuration.
_LLAMA_3: dict[str, tuple[object, ...]] = {
    "low_freq_factor": (1.0,),
    "high_freq_factor": (4.0,),
    "original_max_position_embeddings": (8192,),
}
DEFAULT_BASE = 10000  # transformers' default in older files


def rotary_fields(
    fields: Fields, *, default_share: float | None = None, default_base: int = DEFAULT_BASE
) -> dict[str, object]:
    """Return the rotary fields of `ModelConfig`.

    Args:
        default_share: Rotated share of each head if the file has none; None if the family rotates whole heads.
        default_base: Base if the file has none.

    Raises:
        ConfigError: An unsupported kind of scaling, a base that is not a whole number (megatron-core takes no other),
            or two contradictory values.
    """
    rope = Fields({name: fields[name] for name in ("rope_theta", SHARE) if name in fields})
    for name in _OBJECTS:
        rope.update(_parameters(name, fields, is_whole=default_share is None))
    share = {}
    if default_share is not None:
        shares = _numbers(rope, SHARE)
        share = {"rotary_percent": _agreed(shares) if shares else default_share}
    bases = _numbers(rope, "rope_theta")
    for name, value in bases.items():
        if not value.is_integer():
            rope.refuse(name, "it must be a whole number")
    base = int(_agreed(bases)) if bases else default_base
    return {"position_embedding_type": "rope", "rotary_base": base, **_scaling(rope, fields), **share}


def _scaling(rope: Fields, fields: Fields) -> dict[str, object]:
    """Return the scaling of wavelengths; if both objects have one, they must be equal."""
    kinds = {name: rope.get(f"{name}.rope_type", "default") for name in _OBJECTS}
    scalings: list[dict[str, object]] = []
    for name, kind in kinds.items():
        if kind == YARN:
            scalings.append(yarn_fields(rope, name, fields))
        elif kind != "default":
            scalings.append({"use_rope_scaling": True, "rope_scaling_factor": rope.number(f"{name}.factor")})
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ConfigError("config.json: " + " contradicts ".join(f"{name} {fields[name]!r}" for name in kinds))
    return scalings[0] if scalings else {}


def _parameters(name: str, fields: Fields, *, is_whole: bool) -> Fields:
    """Return the object called `name` with prefixed keys, each known and supported."""
    given = fields.get(name)
    if given is None:
        return Fields()
    if not isinstance(given, dict):
        fields.refuse(name, "it must be an object")
    parameters = Fields({f"{name}.{key}": value for key, value in with_present_names(given, _NAMES).items()})
    fixed = dict(_FIXED)
    if is_whole:
        fixed[SHARE] = (1.0, None)
    known = {"rope_theta", SHARE, *_FIXED}
    kind = parameters.get(f"{name}.rope_type")
    if kind == "llama3":
        fixed |= _LLAMA_3
        known |= {"factor", *_LLAMA_3}
    elif kind == YARN:
        known |= YARN_KEYS
    parameters.check({f"{name}.{key}": values for key, values in fixed.items()})
    for unknown in parameters.unknown({f"{name}.{key}" for key in known}):
        parameters.refuse(unknown, f"--hf-overrides can give another {name}")
    return parameters


def _numbers(rope: Fields, key: str) -> dict[str, float]:
    """Return all non-null values of `key`, by their prefixed name."""
    given = (name for name, value in rope.items() if name.rsplit(".", 1)[-1] == key and value is not None)
    return {name: rope.number(name) for name in given}


def _agreed(given: dict[str, float]) -> float:
    if len(set(given.values())) > 1:
        raise ConfigError("config.json: " + " contradicts ".join(f"{name} {value!r}" for name, value in given.items()))
    return next(iter(given.values()))
