"""Checks of settings, and dataclass fields that declare flags: help text, range, and where defaults are."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from megatron_ext.errors import ConfigError

T = TypeVar("T")
P = ParamSpec("P")
_KEY = "option"


def require(condition: bool, message: str) -> None:
    """Raise a `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def flag_of(field: str) -> str:
    """Return the flag with the name of a field."""
    return "--" + field.replace("_", "-")


@dataclass(frozen=True)
class Option:
    """Declaration of an option.

    Attributes:
        help_text: Text of its flag in `--help`; "" if it has no flag.
        flag: The flag, with its dashes; "" if it is the field's name with dashes.
        aliases: Other spellings of the flag, with their dashes.
        choices: Allowed values, or None for any.
        metavar: Value as shown by `--help`, a tuple for several; None for the default of the field's type.
        minimum: Smallest value of a number; None for any.
        above: Bound that a number must exceed; None without one.
        maximum: Largest value of a number; None for any finite one.
        bounds: Bounds in words, to follow "must be"; "" for the numbers themselves.
        in_generation_config: Whether a model's `generation_config.json` may have a default of the same name.
    """

    help_text: str = ""
    flag: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    metavar: str | tuple[str, ...] | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    bounds: str = ""
    in_generation_config: bool = False

    def name(self, field: str) -> str:
        """Return the flag of a field with this declaration; the field's own name if it has none."""
        return (self.flag or flag_of(field)) if self.help_text else field

    @property
    def is_bounded(self) -> bool:
        """True if a number must be within bounds."""
        return (self.minimum, self.above, self.maximum) != (None, None, None)

    def allows(self, value: float) -> bool:
        """Return whether a number is within the bounds; NaN and infinity are not."""
        is_finite = isinstance(value, int) or math.isfinite(value)
        return (
            is_finite
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    def described(self) -> str:
        """Return the bounds in words, to follow "must be"."""
        if self.bounds:
            return self.bounds
        if self.above is not None:
            return f"more than {self.above}" + ("" if self.maximum is None else f", and at most {self.maximum}")
        if self.minimum is None:
            return f"at most {self.maximum}"
        return f"at least {self.minimum}" if self.maximum is None else f"between {self.minimum} and {self.maximum}"


def _declaring(declare: Callable[P, Option]) -> Callable[Concatenate[T, P], T]:
    """Return a function of a default and the arguments of `declare`, so that mypy checks each declaration."""

    def option(default: T, /, *args: P.args, **attributes: P.kwargs) -> T:
        """Return a dataclass field with a default and an `Option` of these attributes."""
        return dataclasses.field(default=default, metadata={_KEY: declare(*args, **attributes)})

    return option


option = _declaring(Option)


@functools.cache
def options_of(config: type) -> Mapping[str, Option]:
    """Return the options of a dataclass by field, in order."""
    return {one.name: one.metadata[_KEY] for one in dataclasses.fields(config) if _KEY in one.metadata}


def require_options(instance: object, *, by_flag: bool = True) -> None:
    """Require choices and bounds of the options of a dataclass, in order; None is always allowed.

    Args:
        by_flag: Name an option by its flag, if it has one, and not by its field.
    """
    config: type = type(instance)
    for field, declared in options_of(config).items():
        value = getattr(instance, field)
        name = declared.name(field) if by_flag else field
        if declared.choices and value not in (None, *declared.choices):
            raise ConfigError(f"{name} {value!r} is unknown; one of {', '.join(declared.choices)}")
        if declared.is_bounded and value is not None and not declared.allows(value):
            raise ConfigError(f"{name} {value} must be {declared.described()}")
