"""One flag, one field: what argparse and the YAML file need to know comes from the dataclass.

A flag's type is its field's annotation, its default is the field's default. Neither is written twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.annotations import FieldType, MismatchError

_LONGEST_NEAR_MISS = 100  # characters; similarity costs their square
_LONGEST_SHOWN = 200


@dataclass(frozen=True)
class Flag:
    """A field of a dataclass as a flag.

    Attributes:
        field: Name of the dataclass's field.
        help: What it does. Says where the value comes from if the field's default is None.
        name: The flag, with its dashes; "" if it is the field's name with dashes.
        aliases: Other spellings, with their dashes.
        choices: The values allowed, or None for any.
        metavar: How `--help` shows the value; a tuple where there are two.
        is_repeated: Of a list of texts: each one has the flag before it.
    """

    field: str
    help: str
    name: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    metavar: str | tuple[str, ...] | None = None
    is_repeated: bool = False

    @property
    def option(self) -> str:
        """The flag as typed: `--num-layers`."""
        return self.name or "--" + self.field.replace("_", "-")

    @property
    def key(self) -> str:
        """The flag without dashes in front and with dashes inside: `num-layers`. The key in a YAML file."""
        return normalize_key(self.option)

    @property
    def keys(self) -> tuple[str, ...]:
        """The key and those of the aliases."""
        return (self.key, *(normalize_key(alias) for alias in self.aliases))


class _WordsAction(argparse.Action):
    """So many words, apart or in one argument with blanks between them, as Megatron's scripts quote them."""

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
    """The flags of one dataclass."""

    title: str
    config: type
    flags: tuple[Flag, ...]

    def kind(self, flag: Flag) -> FieldType:
        """What the flag's field may be."""
        return FieldType.of(_hints(self.config)[flag.field])

    def default(self, flag: Flag) -> object:
        """The default of the flag's field."""
        (field,) = (field for field in dataclasses.fields(self.config) if field.name == flag.field)
        return field.default

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags to `parser`. A flag that is not given leaves no attribute in the namespace."""
        group = parser.add_argument_group(self.title)
        for flag in self.flags:
            names, kind = (flag.option, *flag.aliases), self.kind(flag)
            metavar, text = flag.metavar or _metavar(kind), self._help(flag)
            add = functools.partial(group.add_argument, *names, dest=flag.key, default=argparse.SUPPRESS, help=text)
            if kind.item is bool:
                add(action=argparse.BooleanOptionalAction)
            elif kind.length:
                add(action=_WordsAction, nargs="+", metavar=metavar, kind=kind)
            elif flag.is_repeated:
                add(action="append", metavar=metavar)
            elif kind.is_tuple and kind.item is str:
                add(type=str, nargs="+", metavar=metavar)
            elif flag.choices:
                add(type=_argparse_type(kind), choices=flag.choices)
            else:
                add(type=_argparse_type(kind), metavar=metavar)

    def parse_value(self, flag: Flag, value: object) -> object:
        """The value of a YAML file, read as the flag's text would be.

        Raises:
            ValueError: With what is wrong, fit to follow the flag's name and a colon.
        """
        kind = self.kind(flag)
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
        if flag.choices and parsed not in flag.choices:
            raise ValueError(f"{shown(parsed)} is unknown; one of {', '.join(flag.choices)}")
        return parsed

    def _help(self, flag: Flag) -> str:
        default = self.default(flag)
        text = flag.help if default is None or default == () else f"{flag.help} (default: {default})"
        return text.replace("%", "%%")


@functools.cache
def _hints(config: type) -> Mapping[str, object]:
    return typing.get_type_hints(config)


def normalize_key(name: str) -> str:
    """`--top_k`, `top-k` and `top_k` are one key."""
    return name.lstrip("-").replace("_", "-")


def closest(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str | None:
    """The one of the known names that was probably meant, if any is like it.

    Names that differ in dashes, underscores and case only are alike; so are one and a part of it between dashes.

    Args:
        name: That is not known.
        known: Those that are.
        others: Those that are, too, and are less likely to have been meant.
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
    """The text, or its beginning if it is too long to be shown in one line."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text)} characters)"


def shown(value: object) -> str:
    """A value that a user gave, in one line."""
    return shorten(repr(value))


def _parse(kind: FieldType, text: str) -> object:
    """One value, or whole numbers with commas between them.

    Raises:
        ValueError: It is neither; with the text and what it is not.
    """
    try:
        return tuple(kind.parse(part) for part in text.split(",")) if kind.is_tuple else kind.parse(text)
    except MismatchError as error:
        expected = f"{kind.expected} with commas, as in 0,4,8" if kind.is_tuple else error
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
