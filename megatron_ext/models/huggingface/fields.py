"""Fields of a decoded `config.json` of any family: unknown or invalid fields are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron_ext.config import LARGEST_SIZE, MAX_LAYERS
from megatron_ext.errors import ConfigError

Fields = Mapping[str, object]  # of a decoded `config.json`, or `ModelConfig`


def names(text: str) -> frozenset[str]:
    """Return the names of fields in a text separated by white space."""
    return frozenset(text.split())


# Fields that affect no family's logits: training and generation settings, hints to servers, names and versions.
WITHOUT_EFFECT = names(
    """
    initializer_range attention_dropout hidden_dropout use_cache
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id
    auto_map dtype torch_dtype transformers_version _name_or_path name_or_path tokenizer_class
    return_dict output_attentions output_hidden_states id2label label2id problem_type finetuning_task
    task_specific_params _attn_implementation _attn_implementation_autoset
    """
)

_FLOATS = ("Infinity", "-Infinity", "NaN")  # in the spelling of transformers 5
_LARGEST_NUMBER = 1e300


def check_architecture(raw: Fields, architecture: str) -> None:
    """Raise unless the model class is the one that generates text, or is absent."""
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
    """Decode special floats; transformers 5 writes infinity as {"__float__": "Infinity"}."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        name = value["__float__"]
        if name not in _FLOATS:
            raise ConfigError(f"config.json: __float__ {name!r} is unknown; one of {', '.join(_FLOATS)}")
        return float(name)
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value


def check_known(fields: Fields, known: Iterable[str]) -> None:
    """Raise for an unknown field, unless its value is empty, null, false or zero."""
    for name in sorted(set(fields) - set(known)):
        value = fields[name]
        if value not in (None, False, 0) and value not in ([], {}, ""):
            raise ConfigError(
                f"config.json: field {name} = {value!r} is not supported; take it out if the logits do not depend on it"
            )


def check_fixed(fields: Fields, fixed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise unless fields with few supported values have one of them; an absent field has the first."""
    for name, supported in fixed.items():
        value = fields.get(name, supported[0])
        comparable = tuple(value) if isinstance(value, list) else value
        if not any(comparable == option and _is_bool(comparable) == _is_bool(option) for option in supported):
            wanted = " or ".join(repr(option) for option in supported)
            raise ConfigError(f"config.json: {name} = {value!r} is not supported; supported is {wanted}")


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
