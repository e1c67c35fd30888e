"""What a `config.json` says of rotary embeddings, in the fields of transformers 5 or of older files."""

from __future__ import annotations

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import (
    Fields,
    check_fixed,
    check_known,
    positive_number,
    with_present_names,
)

# Either object may say everything; the base may stand outside of both.
_OBJECTS = ("rope_parameters", "rope_scaling")
ROPE_FIELDS = frozenset(("rope_theta", *_OBJECTS))
_NAMES = {"type": "rope_type"}
_FIXED: dict[str, tuple[object, ...]] = {"rope_type": ("default", "llama3")}
SHARE = "partial_rotary_factor"
# Of Llama 3.1 and later; megatron-core computes with these values whatever a configuration says.
_LLAMA_3: dict[str, tuple[object, ...]] = {
    "low_freq_factor": (1.0,),
    "high_freq_factor": (4.0,),
    "original_max_position_embeddings": (8192,),
}
_DEFAULT_BASE = 10000  # transformers' where an older file leaves it out


def rotary_fields(fields: Fields, *, default_share: float | None = None) -> dict[str, object]:
    """The rotary fields of `ModelConfig`.

    Args:
        fields: A decoded `config.json`.
        default_share: Of each head that is rotated if the file does not say; None if the family rotates whole heads.

    Raises:
        ConfigError: A way of scaling that is not supported, a base that is no whole number (megatron-core takes no
            other), or two that contradict each other.
    """
    bases = {"rope_theta": fields["rope_theta"]} if fields.get("rope_theta") is not None else {}
    shares = {SHARE: fields[SHARE]} if default_share is not None and fields.get(SHARE) is not None else {}
    factors: dict[str, object] = {}
    for name in _OBJECTS:
        parameters = _parameters(name, fields.get(name), is_whole=default_share is None)
        base, factor, share = f"{name}.rope_theta", f"{name}.factor", f"{name}.{SHARE}"
        if parameters.get(base) is not None:
            bases[base] = parameters[base]
        if default_share is not None and parameters.get(share) is not None:
            shares[share] = positive_number(parameters, share, default=default_share)
        if parameters.get(f"{name}.rope_type") == "llama3":
            factors[factor] = positive_number(parameters, factor, default=None)
    scaling = {"use_rope_scaling": True, "rope_scaling_factor": _agreed(factors)} if factors else {}
    share = {} if default_share is None else {"rotary_percent": _agreed(shares) if shares else default_share}
    return {"position_embedding_type": "rope", "rotary_base": _whole_number(bases), **scaling, **share}


def _parameters(name: str, given: object, *, is_whole: bool) -> dict[str, object]:
    """The object called `name`, its keys with that name in front, each known and supported."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: {name} = {given!r} is not supported; it must be an object")
    parameters = {f"{name}.{key}": value for key, value in with_present_names(given, _NAMES).items()}
    fixed = dict(_FIXED)
    if is_whole:
        fixed[SHARE] = (1.0, None)
    known = {"rope_theta", SHARE, *_FIXED}
    if parameters.get(f"{name}.rope_type") == "llama3":
        fixed |= _LLAMA_3
        known |= {"factor", *_LLAMA_3}
    check_fixed(parameters, {f"{name}.{key}": values for key, values in fixed.items()})
    check_known(parameters, {f"{name}.{key}" for key in known})
    return parameters


def _whole_number(bases: dict[str, object]) -> int:
    values = {name: positive_number(bases, name, default=_DEFAULT_BASE) for name in bases}
    for name, value in values.items():
        if not value.is_integer():
            raise ConfigError(f"config.json: {name} = {value!r} is not supported; it must be a whole number")
    return int(_agreed(bases)) if bases else _DEFAULT_BASE


def _agreed(given: dict[str, object]) -> float:
    if len({float(value) for value in given.values()}) > 1:
        raise ConfigError("config.json: " + " contradicts ".join(f"{name} {value!r}" for name, value in given.items()))
    return float(next(iter(given.values())))
