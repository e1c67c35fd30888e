"""Checks of settings, and dataclass fields with the help texts and bounds of their flags."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from megatron_ext.errors import ConfigError

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise a `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def flag_of(field: str) -> str:
    """Return the flag with the name of a field."""
    return "--" + field.replace("_", "-")


def flag(default: T, help_text: str, *, maximum: int | None = None) -> T:
    """Return a dataclass field with a flag of the same name and its text in `--help`; `maximum` as in `bounded`."""
    return dataclasses.field(default=default, metadata={"help": help_text, "maximum": maximum})


def bounded(default: T, maximum: int) -> T:
    """Return a dataclass field with an upper bound of its own, in place of the common one for sizes."""
    return dataclasses.field(default=default, metadata={"maximum": maximum})


def bounds_of(config: type) -> dict[str, int]:
    """Return the upper bounds of the fields that have one of their own."""
    return {one.name: one.metadata["maximum"] for one in dataclasses.fields(config) if one.metadata.get("maximum")}


def flags_of(config: type) -> dict[str, str]:
    """Return the fields made by `flag`, in order, with their help texts."""
    return {one.name: one.metadata["help"] for one in dataclasses.fields(config) if "help" in one.metadata}
