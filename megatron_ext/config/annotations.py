"""Conversion and checks of external values for the fields of a dataclass, by the fields' annotations alone.

The values come from checkpoints, prompt files, YAML files and command lines. Each caller builds its own error text
around `expected`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeGuard

from megatron_ext.errors import ConfigError

# Arguments of a dataclass's constructor, checked here at run time, so that their types are unknown to a type checker.
FieldValues = Mapping[str, Any]

_SINGULAR = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_PLURAL = {int: "whole numbers", float: "numbers", str: "texts"}
_COUNTS = {None: "", 2: "two "}


class MismatchError(ValueError):
    """Error of a value that a field cannot have; its text is what the field expects, such as "a whole number"."""


@dataclass(frozen=True)
class FieldType:
    """Type of a field: one item or a tuple of items, possibly optional.

    Attributes:
        item: bool, int, float or str, or a class with a form of its own (`TokenBiases`).
        is_tuple: Whether the field is a tuple of items.
        length: Number of items of a tuple; None for any number.
        is_optional: Whether None is allowed.
    """

    item: type
    is_tuple: bool = False
    length: int | None = None
    is_optional: bool = False

    @classmethod
    def of(cls, annotation: object) -> FieldType:
        """Parse an annotation: `int`, `str | None`, `tuple[str, ...]`, `tuple[str, str] | None`."""
        is_optional = isinstance(annotation, types.UnionType)
        if is_optional:
            (annotation,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
        if typing.get_origin(annotation) is not tuple:
            assert isinstance(annotation, type), annotation
            assert annotation in _SINGULAR or _is_custom(annotation), annotation
            return cls(annotation, is_optional=is_optional)
        items = typing.get_args(annotation)
        length = None if items[-1] is Ellipsis else len(items)
        return cls(items[0], is_tuple=True, length=length, is_optional=is_optional)

    @property
    def expected(self) -> str:
        """Description of the expected value in words, to follow "is not"."""
        if not self.is_tuple:
            return self.item.expected if _is_custom(self.item) else _SINGULAR[self.item]
        return f"a list of {_COUNTS[self.length]}{_PLURAL[self.item]}"

    @property
    def type_names(self) -> str:
        """Python's name of the type, to follow "of type"."""
        return ("tuple" if self.is_tuple else self.item.__name__) + (" or null" if self.is_optional else "")

    def convert(self, value: object) -> object:
        """Convert a JSON value to the field's type: a list becomes a tuple, and an int a float if the field is one.

        True and false are not numbers, and there are no other conversions.

        Raises:
            MismatchError: The value does not have the field's type.
        """
        if value is None and self.is_optional:
            return None
        if not self.is_tuple:
            return self._convert_item(value)
        if not isinstance(value, list | tuple) or self.length not in (None, len(value)):
            raise MismatchError(self.expected)
        return tuple(self._convert_item(item) for item in value)

    def _convert_item(self, value: object) -> object:
        if type(value) is self.item:
            return value
        if _is_custom(self.item):
            try:
                return self.item.of(value)
            except ValueError as error:
                raise MismatchError(str(error)) from None
        if self.item is float and type(value) is int:
            try:
                return float(value)
            except OverflowError:
                pass
        raise MismatchError(self.expected)

    def parse(self, text: str) -> object:
        """Parse an item from command-line text: JSON if its class has a form of its own.

        Raises:
            MismatchError: The text is not a valid item.
        """
        assert self.item is not bool, "a flag of its own, without a value"
        if not _is_custom(self.item):
            try:
                parsed: object = self.item(text)
                return parsed
            except ValueError:
                raise MismatchError(_SINGULAR[self.item]) from None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise MismatchError(self.item.expected) from None
        return self._convert_item(value)


class CustomParser(Protocol):
    """Class that converts its own values.

    Attributes:
        expected: Description of the form in words, to follow "is not".
    """

    expected: ClassVar[str]

    @classmethod
    def of(cls, value: object) -> object:
        """Convert a value from JSON or from code; raises ValueError for any other, whose text follows "is not"."""


def _is_custom(item: type) -> TypeGuard[type[CustomParser]]:
    return hasattr(item, "of")


def require_types(instance: object) -> None:
    """Check the fields of a frozen dataclass against their annotations; a list becomes a tuple."""
    config: type = type(instance)
    for name, kind in field_types(config).items():
        value = getattr(instance, name)
        try:
            converted = kind.convert(value)
        except MismatchError as error:
            raise ConfigError(f"{name} {value!r} is not {error}") from None
        if converted is not value:
            object.__setattr__(instance, name, converted)


@functools.cache
def field_types(config: type) -> Mapping[str, FieldType]:
    """Return the types of all fields of a dataclass by name, in order."""
    hints = typing.get_type_hints(config)
    return {field.name: FieldType.of(hints[field.name]) for field in dataclasses.fields(config)}
