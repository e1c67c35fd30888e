"""Flags bound to dataclass fields: argparse and the YAML reader take types and defaults from the dataclass.

A flag's type is its field's annotation, its default is the field's default. Neither is written twice.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.annotations import FieldType, FieldValues, MismatchError
from megatron_ext.config.options import Option, flag_of, options_of

_LONGEST_NEAR_MISS = 100  # characters; the cost of similarity is quadratic
_LONGEST_SHOWN = 200
_SIZE = re.compile(r"(?P<number>\d{1,9}(\.\d{1,6})?)(?P<unit>[kKmMgG])")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}  # as in vLLM


@dataclass(frozen=True)
class Flag:
    """Flag of a dataclass's field, with the field's type and default."""

    config: type
    field: str
    declared: Option

    @property
    def option(self) -> str:
        """Flag as typed: `--num-layers`."""
        return self.declared.flag or flag_of(self.field)

    @property
    def names(self) -> tuple[str, ...]:
        """Flag and its other spellings, with their dashes."""
        return (self.option, *self.declared.aliases)

    @property
    def words(self) -> tuple[str, ...]:
        """Names as typed, with the `--no-` forms of a switch."""
        negated = [name.replace("--", "--no-", 1) for name in self.names if self.kind.item is bool]
        return (*self.names, *negated)

    @property
    def key(self) -> str:
        """Flag without dashes in front and with dashes inside: `num-layers`. The key in a YAML file."""
        return normalize_key(self.option)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the flag and of its aliases."""
        return tuple(map(normalize_key, self.names))

    @property
    def kind(self) -> FieldType:
        """Type of the field."""
        return FieldType.of(_hints(self.config)[self.field])

    @property
    def default(self) -> object:
        """Default of the field."""
        return getattr(self.config, self.field)

    def add_to(self, add_argument: Callable[..., argparse.Action], *, as_attribute: bool = False) -> None:
        """Add the flag by the `add_argument` of a section of a parser.

        Args:
            as_attribute: Name its value in the namespace with underscores, and leave None if the flag is not given.
        """
        kind, metavar = self.kind, self.declared.metavar or _metavar(self.kind)
        dest, default = (self.key.replace("-", "_"), None) if as_attribute else (self.key, argparse.SUPPRESS)
        text = self.declared.help_text
        if self.default is not None and self.default != ():
            text += f" (default: {self.default})"
        add = functools.partial(add_argument, *self.names, dest=dest, default=default, help=text.replace("%", "%%"))
        if kind.item is bool:
            add(action=argparse.BooleanOptionalAction)
        elif kind.length:
            add(action=_WordsAction, nargs="+", metavar=metavar, kind=kind)
        elif kind.is_tuple and kind.item is str:
            add(type=str, nargs="+", metavar=metavar)
        elif self.declared.choices:
            add(type=_argparse_type(kind), choices=self.declared.choices)
        else:
            add(type=_argparse_type(kind), metavar=metavar)

    def parse_value(self, value: object) -> object:
        """Return a value of a YAML file, parsed like the flag's text.

        Raises:
            ValueError: The value is invalid; the message can follow the flag's name and a colon.
        """
        kind, choices = self.kind, self.declared.choices
        if kind.item is bool or (kind.is_tuple and kind.item is str):
            given = [str(item) for item in value] if isinstance(value, list) else value
            try:
                return kind.convert(given)
            except MismatchError as error:
                raise ValueError(f"{shown(value)} is not {error}") from None
        if kind.is_tuple and isinstance(value, list):
            value = ",".join(str(item) for item in value)
        if isinstance(value, (list, dict)) or value is None:
            raise ValueError(f"{shown(value)} is not one value")
        parsed = _parse(kind, str(value))
        if kind.length and isinstance(parsed, tuple) and len(parsed) != kind.length:
            raise ValueError(f"{shown(value)} is not {kind.expected}")
        if choices and parsed not in choices:
            raise ValueError(f"{shown(parsed)} is unknown; one of {', '.join(choices)}")
        return parsed


class _WordsAction(argparse.Action):
    """Action that takes a number of words, as separate arguments or in one quoted argument, as Megatron does."""

    def __init__(self, option_strings: Sequence[str], dest: str, kind: FieldType, **options: Any) -> None:
        super().__init__(option_strings, dest, **options)
        self._kind = kind

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = [word for value in values or () for word in str(value).split()]
        if len(words) != self._kind.length:
            raise argparse.ArgumentError(self, f"expected {self._kind.length} arguments, got {shown(' '.join(words))}")
        try:
            setattr(namespace, self.dest, tuple(self._kind.parse(word) for word in words))
        except MismatchError as error:
            raise argparse.ArgumentError(self, f"{shown(' '.join(words))} is not {error}") from None


@dataclass(frozen=True)
class FlagGroup:
    """Flags of the fields that one dataclass declares itself, without inherited ones."""

    title: str
    config: type

    @functools.cached_property
    def flags(self) -> tuple[Flag, ...]:
        """Flags, in the order of the fields."""
        own = vars(self.config)["__annotations__"]
        options = options_of(self.config).items()
        return tuple(Flag(self.config, field, one) for field, one in options if one.help_text and field in own)

    def fields(self, values: FieldValues) -> FieldValues:
        """Return the given fields of the dataclass, from values by flag key."""
        return {flag.field: values[flag.key] for flag in self.flags if flag.key in values}

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`. A flag that is not given leaves no attribute in the namespace."""
        section = parser.add_argument_group(self.title)
        for flag in self.flags:
            flag.add_to(section.add_argument)


@functools.cache
def _hints(config: type) -> Mapping[str, object]:
    return typing.get_type_hints(config)


def normalize_key(name: str) -> str:
    """Return the key of a name: `--top_k`, `top-k` and `top_k` are equal."""
    return name.lstrip("-").replace("_", "-")


def closest(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str | None:
    """Return the known name that was probably meant, or None.

    Names that differ only in dashes, underscores and case match; so do a name and a part of it between dashes.

    Args:
        others: Known names that are less likely to have been meant.
    """
    if len(name) > _LONGEST_NEAR_MISS:
        return None
    key = normalize_key(name.lower())
    likely, less_likely = ({normalize_key(other.lower()): other for other in group} for group in (known, others))
    by_key = less_likely | likely
    parts = [other for other in by_key if f"-{key}-" in f"-{other}-"]
    alike = sorted(parts, key=lambda other: (other not in likely, len(other)))
    alike = alike or difflib.get_close_matches(key, by_key, n=1)
    return by_key[alike[0]] if alike else None


def shorten(text: str) -> str:
    """Return the text, or its beginning if it is too long to be shown in one line."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def shown(value: object) -> str:
    """Return a user's value in one line."""
    return shorten(repr(value))


def _parse(kind: FieldType, text: str) -> object:
    """Parse one value, or integers separated by commas.

    Raises:
        ValueError: The text is neither; the message has the text and the expected type.
    """
    size = _SIZE.fullmatch(text) if kind.item is int and not kind.is_tuple else None
    if size is not None:
        number = float(size["number"]) * _UNITS[size["unit"]]
        if number.is_integer():
            return int(number)
    try:
        return tuple(kind.parse(part) for part in text.split(",")) if kind.is_tuple else kind.parse(text)
    except MismatchError as error:
        expected = f"{kind.expected} separated by commas, as in 0,4,8" if kind.is_tuple else error
        raise ValueError(f"{shown(text)} is not {expected}") from None


def _argparse_type(kind: FieldType) -> Callable[[str], object]:
    def parse_argument(text: str) -> object:
        try:
            return _parse(kind, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def _metavar(kind: FieldType) -> str | tuple[str, ...]:
    if kind.length and kind.item is int:
        return ("N",) * kind.length
    return "I,J,..." if kind.is_tuple and kind.item is int else {int: "N", float: "X"}.get(kind.item, "TEXT")
