"""Values from outside for the fields of a dataclass: the annotation says what they must be, and nothing else does.

Checkpoints, prompt files, YAML files and command lines bring them. Each caller words its own errors around `expected`.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeGuard

from megatron_ext.errors import ConfigError

# Values on their way into a dataclass's constructor: checked here, when the program runs, so that no type checker can
# know what each one is.
FieldValues = Mapping[str, Any]

_SINGULAR = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_PLURAL = {int: "whole numbers", float: "numbers", str: "texts"}
_COUNTS = {None: "", 2: "two "}


class MismatchError(ValueError):
    """A value that a field cannot have. Its text is what the field expects: "a whole number"."""


@dataclass(frozen=True)
class FieldType:
    """What an annotation allows: one value, or a tuple of them; or None.

    Attributes:
        item: bool, int, float or str, or a class of values with a form of their own (`TokenBiases`).
        is_tuple: Whether the field is a tuple of items.
        length: How many items a tuple has; None for any number.
        is_optional: Whether None is a value.
    """

    item: type
    is_tuple: bool = False
    length: int | None = None
    is_optional: bool = False

    @classmethod
    def of(cls, annotation: object) -> FieldType:
        """Take an annotation apart: `int`, `str | None`, `tuple[str, ...]`, `tuple[str, str] | None`."""
        is_optional = isinstance(annotation, types.UnionType)
        if is_optional:
            (annotation,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
        if typing.get_origin(annotation) is not tuple:
            assert isinstance(annotation, type), annotation
            assert annotation in _SINGULAR or _has_own_form(annotation), annotation
            return cls(annotation, is_optional=is_optional)
        items = typing.get_args(annotation)
        length = None if items[-1] is Ellipsis else len(items)
        return cls(items[0], is_tuple=True, length=length, is_optional=is_optional)

    @property
    def expected(self) -> str:
        """In words, to follow "is not"."""
        if not self.is_tuple:
            return _expected(self.item)
        return f"a list of {_COUNTS[self.length]}{_PLURAL[self.item]}"

    @property
    def type_names(self) -> str:
        """In Python's words, to follow "of type"."""
        return ("tuple" if self.is_tuple else self.item.__name__) + (" or null" if self.is_optional else "")

    def convert(self, value: object) -> object:
        """A value of JSON as one of the field's: a list becomes a tuple, a whole number a float where that is due.

        True and false are no numbers, and nothing else is taken for what it is not.

        Raises:
            MismatchError: It is none.
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
        if _has_own_form(self.item):
            return self._made(self.item.of, value)
        if self.item is float and type(value) is int:
            try:
                return float(value)
            except OverflowError:
                pass
        raise MismatchError(self.expected)

    def parse(self, text: str) -> object:
        """An item as a person types it.

        Raises:
            MismatchError: It is none.
        """
        assert self.item is not bool, "a flag of its own, without a value"
        if _has_own_form(self.item):
            return self._made(self.item.parse, text)
        try:
            parsed: object = self.item(text)
            return parsed
        except ValueError:
            raise MismatchError(_SINGULAR[self.item]) from None

    def _made(self, make: Callable[..., object], value: object) -> object:
        try:
            return make(value)
        except ValueError as error:
            raise MismatchError(str(error)) from None


class OwnForm(Protocol):
    """A class whose values are read in a form of their own; both methods raise ValueError for anything else.

    The error's words follow "is not".

    Attributes:
        expected: The form in words, to follow "is not".
    """

    expected: ClassVar[str]

    @classmethod
    def of(cls, value: object) -> object:
        """Of what JSON or a program gives."""

    @classmethod
    def parse(cls, text: str) -> object:
        """Of what a person types."""


def _has_own_form(item: type) -> TypeGuard[type[OwnForm]]:
    return hasattr(item, "of") and hasattr(item, "parse")


def _expected(item: type) -> str:
    return item.expected if _has_own_form(item) else _SINGULAR[item]


def require_types(instance: object) -> None:
    """See that the fields of a frozen dataclass have the types that their annotations say; a list becomes a tuple.

    Raises:
        ConfigError: Names the first field that has not.
    """
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
    """Every field of a dataclass that can be given from outside, in order."""
    return {name: FieldType.of(hint) for name, hint in typing.get_type_hints(config).items()}
