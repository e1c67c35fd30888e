"""Rotary embedding fields of a `config.json`, in the format of transformers 5 or of older files."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import (
    Fields,
    check_fixed,
    positive_number,
    unknown_names,
    with_present_names,
)
from megatron_ext.models.huggingface.yarn import YARN, YARN_KEYS, yarn_fields

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
        fields: A decoded `config.json`.
        default_share: Rotated share of each head if the file has none; None if the family rotates whole heads.
        default_base: Base if the file has none.

    Raises:
        ConfigError: An unsupported kind of scaling, a base that is not a whole number (megatron-core takes no other),
            or two contradictory values.
    """
    rope = {name: fields[name] for name in ("rope_theta", SHARE) if name in fields}
    for name in _OBJECTS:
        rope.update(_parameters(name, fields.get(name), is_whole=default_share is None))
    share = {}
    if default_share is not None:
        shares = _numbers(rope, SHARE)
        share = {"rotary_percent": _agreed(shares) if shares else default_share}
    base = _whole_number(_numbers(rope, "rope_theta"), default_base)
    return {"position_embedding_type": "rope", "rotary_base": base, **_scaling(rope, fields), **share}


def _scaling(rope: Fields, fields: Fields) -> dict[str, object]:
    """Return the scaling of wavelengths; if both objects have one, they must be equal."""
    kinds = {name: rope.get(f"{name}.rope_type", "default") for name in _OBJECTS}
    scalings: list[dict[str, object]] = []
    for name, kind in kinds.items():
        if kind == YARN:
            scalings.append(yarn_fields(rope, name, fields))
        elif kind != "default":
            scalings.append({"use_rope_scaling": True, "rope_scaling_factor": positive_number(rope, f"{name}.factor")})
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ConfigError("config.json: " + " contradicts ".join(f"{name} {fields[name]!r}" for name in kinds))
    return scalings[0] if scalings else {}


def _parameters(name: str, given: object, *, is_whole: bool) -> dict[str, object]:
    """Return the object called `name` with prefixed keys, each known and supported."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: {name} = {given!r} is not supported; it must be an object")
    parameters = {f"{name}.{key}": value for key, value in with_present_names(given, _NAMES).items()}
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
    check_fixed(parameters, {f"{name}.{key}": values for key, values in fixed.items()})
    unknown = unknown_names(parameters, {f"{name}.{key}" for key in known})
    if unknown:
        raise ConfigError(
            f"config.json: {unknown[0]} = {parameters[unknown[0]]!r} is not supported; --hf-overrides can give another "
            f"{name}"
        )
    return parameters


def _numbers(rope: Fields, key: str) -> dict[str, float]:
    """Return all non-null values of `key`, by their prefixed name."""
    return {
        name: positive_number(rope, name)
        for name, value in rope.items()
        if name.rsplit(".", 1)[-1] == key and value is not None
    }


def _whole_number(bases: dict[str, float], default: int) -> int:
    for name, value in bases.items():
        if not value.is_integer():
            raise ConfigError(f"config.json: {name} = {value!r} is not supported; it must be a whole number")
    return int(_agreed(bases)) if bases else default


def _agreed(given: dict[str, float]) -> float:
    if len(set(given.values())) > 1:
        raise ConfigError("config.json: " + " contradicts ".join(f"{name} {value!r}" for name, value in given.items()))
    return next(iter(given.values()))
