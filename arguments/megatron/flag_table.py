"""Table of all Megatron-LM flags that set no field of this package: `flags.yaml`, beside this module; in argparse."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from arguments.flags import FlagGroup
from arguments.groups import SAMPLING
from megatron_ext.errors import ConfigError

_COUNTS: Mapping[str, int | None] = {"none": 0, "one": 1, "many": None}
_NOTHING: Mapping[str, str] = {}


Kind: TypeAlias = Literal["accepted", "refused"]  # an accepted flag has no effect


@dataclass(frozen=True)
class MegatronFlag:
    """One flag.

    Attributes:
        name: Flag as typed. A name that ends with `*` stands for every flag with this prefix; only a refused one may.
        kind: Effect of the flag.
        why: Reason for having no effect or being refused; follows the flag's name and a colon.
        count: Number of values: 0, 1, or None for one and more. Ignored for a refused flag.
        only: The one accepted value, or None. Numbers are equal however they are written.
        unless: Flag beside which a refused one is accepted, or None; `synonyms.py` checks it once all are known.
        refused_values: Values of an accepted flag that are refused nevertheless, with reasons.
        warned_values: Values of an accepted flag that need a warning, with that line.
    """

    name: str
    kind: Kind
    why: str
    count: int | None = 1
    only: str | None = None
    unless: str | None = None
    refused_values: Mapping[str, str] = field(default_factory=dict, hash=False)
    warned_values: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_family(self) -> bool:
        """True if the record stands for every flag with its prefix."""
        return self.name.endswith("*")

    @property
    def is_refused(self) -> bool:
        """True if the flag is refused whatever else is given."""
        return self.kind == "refused" and self.unless is None

    def covers(self, option: str) -> bool:
        """Return whether the record applies to a flag."""
        return option.startswith(self.name[:-1]) if self.is_family else option == self.name

    def check(self, words: Sequence[str], option: str | None = None) -> None:
        """Refuse the flag, or values that it does not accept.

        Args:
            option: Flag as typed; its name if missing.
        """
        typed = " ".join((option or self.name, *words))
        if self.is_refused:
            raise ConfigError(f"{typed} is refused: {self.why}")
        if self.only is not None and not all(_is_same(word, self.only) for word in words):
            raise ConfigError(f"{typed} is refused: {self.why}; give {self.only}")
        for value, reason in self.refused_values.items():
            if value in words:
                raise ConfigError(f"{typed} is refused: {reason}")


@dataclass(frozen=True)
class MegatronGroup:
    """Flags that form a section of `--help`: with equal effect, for one reason."""

    title: str
    flags: tuple[MegatronFlag, ...]

    @property
    def heading(self) -> str:
        """Title of the section."""
        first = self.flags[0]
        effect = "accepted without effect" if first.kind == "accepted" else "refused"
        if first.unless or first.only:
            effect = f"refused without {first.unless}" if first.unless else f"accepted with {first.only} only"
        return f"Megatron's, {effect}: {self.title}"


def _group(
    title: str,
    kind: Kind,
    why: str,
    only: str | None = None,
    unless: str | None = None,
    refused_values: Mapping[str, str] = _NOTHING,
    warned_values: Mapping[str, str] = _NOTHING,
    **names: Sequence[str],
) -> MegatronGroup:
    flags = tuple(
        MegatronFlag(name, kind, why, count, only, unless, refused_values, warned_values)
        for key, count in _COUNTS.items()
        for name in names.pop(key, ())
    )
    assert not names, f"unknown keys of the group {title}"
    return MegatronGroup(title, flags)


def _of_requests(group: FlagGroup) -> MegatronGroup:
    """Return records of a run's request flags, which the server ignores: there, each request has its own values."""
    why = "each request says that for itself"
    counts = {flag: 0 if flag.kind.item is bool else None if flag.kind.is_tuple else 1 for flag in group.flags}
    flags = (MegatronFlag(name, "accepted", why, count) for flag, count in counts.items() for name in flag.words)
    return MegatronGroup("requests", tuple(flags))


TABLE = tuple(_group(**entry) for entry in yaml.safe_load(Path(__file__).with_name("flags.yaml").read_text("utf-8")))
SERVER_TABLE = (*TABLE, _of_requests(SAMPLING))


def records(groups: Sequence[MegatronGroup] = TABLE) -> Iterator[MegatronFlag]:
    """Yield every record, in order."""
    return (flag for one in groups for flag in one.flags)


def family_of(option: str) -> MegatronFlag | None:
    """Return the record of the flag's family, or None."""
    return next((flag for flag in records() if flag.is_family and flag.covers(option)), None)


@dataclass
class WithoutEffect:
    """Collector of accepted flags without effect.

    Attributes:
        options: Flags, in the order in which they were given, each once.
        warnings: Lines about some of their values.
    """

    options: dict[str, None] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, flag: MegatronFlag, words: Sequence[str]) -> None:
        """Check and add a given flag."""
        flag.check(words)
        self.note(flag.name)
        for value, text in flag.warned_values.items():
            warning = f"{flag.name} {value}: {text}"
            if value in words and warning not in self.warnings:
                self.warnings.append(warning)

    def note(self, option: str) -> None:
        """Note a flag or another setting without effect."""
        self.options[option] = None

    def lines(self) -> tuple[str, ...]:
        """Return the lines for the start of a run: one for all flags, and those about values."""
        if not self.options:
            return tuple(self.warnings)
        return (f"accepted, and without effect here: {', '.join(self.options)}", *self.warnings)


def _is_same(word: str, other: str) -> bool:
    return word == other or _number(word) == _number(other) is not None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


DEST = "without effect"  # name in argparse's namespace; no flag's key has a blank


class _TakeAction(argparse.Action):
    """Action that checks the values of a flag, and notes that it has no effect."""

    def __init__(self, option_strings: Sequence[str], dest: str, flag: MegatronFlag, **options: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **options)
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = [values] if isinstance(values, str) else [str(value) for value in values or ()]
        given: WithoutEffect = getattr(namespace, DEST, None) or WithoutEffect()
        given.add(self._flag, words)
        setattr(namespace, DEST, given)


def add_to(parser: argparse.ArgumentParser, groups: Sequence[MegatronGroup] = TABLE) -> list[str]:
    """Add a table's flags to a parser, and return them; not families, since argparse knows whole names only."""
    added = []
    for one in groups:
        section = parser.add_argument_group(one.heading, one.flags[0].why)
        for flag in one.flags:
            if not flag.is_family:
                section.add_argument(
                    flag.name, dest=DEST, action=_TakeAction, flag=flag, nargs=_nargs(flag), metavar=flag.only or "TEXT"
                )
                added.append(flag.name)
    return added


def take(flag: MegatronFlag, value: object, into: WithoutEffect) -> None:
    """Note a flag of a YAML file.

    Args:
        value: Parsed value: true for a flag alone, a value, or a list of values.
        into: Collector of flags without effect.

    Raises:
        ConfigError: The flag or its values are refused.
        ValueError: The number of values does not fit the flag.
    """
    if flag.is_refused:
        flag.check([])
    if flag.count == 0:
        if value is not True:
            raise ValueError(f"{value!r} is not true, and the flag takes no value; leave the flag out to switch it off")
        into.add(flag, [])
        return
    values = value if isinstance(value, list) else [value]
    if not values or value is None or (flag.count == 1 and isinstance(value, list)):
        raise ValueError(f"{value!r} is not {'one value' if flag.count == 1 else 'a value or a list of them'}")
    into.add(flag, [str(item) for item in values])


def _nargs(flag: MegatronFlag) -> int | str | None:
    if flag.is_refused:
        return "*"  # any values: the error is the reason
    return {0: 0, 1: None, None: "+"}[flag.count]
