"""Megatron-LM's flags in argparse: added from the table, and collected when given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from arguments.megatron.flag_table import TABLE, MegatronFlag, MegatronGroup, WithoutEffect

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
    """Add the flags of a table to a parser; families are left out, since argparse knows whole names only.

    Returns:
        Flags that were added.
    """
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
        flag: Record of the flag.
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
