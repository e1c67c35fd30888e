"""How settings refuse, and how fields say what their flags do."""

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
    """The flag that sets a field, where it has the field's name."""
    return "--" + field.replace("_", "-")


def flag(default: T, help_text: str, *, most: int | None = None) -> T:
    """A dataclass field that is a flag of its own name, told about in `--help`; `most` as in `bounded`."""
    return dataclasses.field(default=default, metadata={"help": help_text, "most": most})


def bounded(default: T, most: int) -> T:
    """A dataclass field whose value may be at most `most`, where that is another number than for all sizes."""
    return dataclasses.field(default=default, metadata={"most": most})


def bounds_of(config: type) -> dict[str, int]:
    """Fields with a bound of their own."""
    return {one.name: one.metadata["most"] for one in dataclasses.fields(config) if one.metadata.get("most")}


def flags_of(config: type) -> dict[str, str]:
    """Fields made by `flag`, in order, and what they do."""
    return {one.name: one.metadata["help"] for one in dataclasses.fields(config) if "help" in one.metadata}
