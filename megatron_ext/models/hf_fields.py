"""Values of a decoded `config.json`, refused by the name of their field where they make no sense."""

from __future__ import annotations

import math
from typing import Any

from megatron_ext.errors import ConfigError


def require_field(fields: dict[str, Any], name: str) -> Any:
    """A field that must be there."""
    if name not in fields:
        raise ConfigError(f"config.json: field {name} is missing")
    return fields[name]


def size(fields: dict[str, Any], name: str) -> int:
    """A positive integer that must be there."""
    value = require_field(fields, name)
    if type(value) is not int or value <= 0:
        raise ConfigError(f"config.json: {name} = {value!r} is not supported; it must be a positive integer")
    return value


def check_divides(fields: dict[str, Any], divisor: str, dividend: str) -> None:
    """One size is a whole part of another."""
    small, large = size(fields, divisor), size(fields, dividend)
    if large % small:
        raise ConfigError(f"config.json: {divisor} = {small} is not supported; it must divide {dividend} = {large}")


def flag(fields: dict[str, Any], name: str, *, default: bool) -> bool:
    """True or false."""
    value = fields.get(name, default)
    if type(value) is not bool:
        raise ConfigError(f"config.json: {name} = {value!r} is not supported; it must be true or false")
    return value


def positive_number(fields: dict[str, Any], name: str, *, default: float) -> float:
    """A number above zero, whole or not."""
    value = fields.get(name, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {name} = {value!r} is not supported; it must be a positive number")
    return float(value)
