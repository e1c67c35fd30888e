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
    said = {name: fields[name] for name in ("rope_theta", SHARE) if name in fields}
    for name in _OBJECTS:
        said.update(_parameters(name, fields.get(name), is_whole=default_share is None))
    bases, factors = _numbers(said, "rope_theta"), _numbers(said, "factor")
    scaling = {"use_rope_scaling": True, "rope_scaling_factor": _agreed(factors)} if factors else {}
    share = {}
    if default_share is not None:
        shares = _numbers(said, SHARE)
        share = {"rotary_percent": _agreed(shares) if shares else default_share}
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
    if parameters.get(f"{name}.rope_type") == "llama3":
        positive_number(parameters, f"{name}.factor")
    else:
        parameters.pop(f"{name}.factor", None)  # one that says nothing
    return parameters


def _numbers(said: Fields, key: str) -> dict[str, float]:
    """What is called `key`, wherever it stands, unless it is null."""
    return {
        name: positive_number(said, name)
        for name, value in said.items()
        if name.rsplit(".", 1)[-1] == key and value is not None
    }


def _whole_number(bases: dict[str, float]) -> int:
    for name, value in bases.items():
        if not value.is_integer():
            raise ConfigError(f"config.json: {name} = {value!r} is not supported; it must be a whole number")
    return int(_agreed(bases)) if bases else _DEFAULT_BASE


def _agreed(given: dict[str, float]) -> float:
    if len(set(given.values())) > 1:
        raise ConfigError("config.json: " + " contradicts ".join(f"{name} {value!r}" for name, value in given.items()))
    return next(iter(given.values()))
