"""Settings of a model from outside (a checkpoint, a YAML file, flags): names and types checked before they are used."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from megatron_ext.config import LARGEST_SIZE, ModelConfig

_TYPES = typing.get_type_hints(ModelConfig)


def checked_fields(values: Mapping[str, Any], where: str, error: type[ValueError]) -> dict[str, Any]:
    """The same fields, fit for `ModelConfig(**fields)`: lists made tuples, integers made floats where a float is due.

    Args:
        values: Field name to value.
        where: What holds them, for the message.
        error: What to raise for an unknown name or a wrong type.
    """
    unknown = sorted(set(values) - set(_TYPES))
    if unknown:
        raise error(f"{where} has unknown model field {', '.join(unknown)}; known are {', '.join(_TYPES)}")
    return {name: _converted(name, value, where, error) for name, value in values.items()}


def _converted(name: str, value: Any, where: str, error: type[ValueError]) -> Any:
    expected = _TYPES[name]
    if isinstance(expected, types.UnionType):
        options = typing.get_args(expected)
    else:
        options = (expected,)
    if type(value) in options or (value is None and types.NoneType in options):
        return value
    if float in options and type(value) is int and abs(value) <= LARGEST_SIZE:
        return float(value)
    if isinstance(value, list | tuple) and tuple[str, str] in options and [type(part) for part in value] == [str, str]:
        return tuple(value)
    kinds = " or ".join("null" if option is types.NoneType else getattr(option, "__name__", "?") for option in options)
    raise error(f"{where} has {name} = {value!r}; it must be of type {kinds}")


def with_overrides(config: ModelConfig, overrides: Mapping[str, Any]) -> ModelConfig:
    """The configuration with some fields replaced; `overrides` must have passed `checked_fields`."""
    return dataclasses.replace(config, **overrides)
