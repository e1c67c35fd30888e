"""Megatron-LM's flags in argparse: added from the table, and collected as they are given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from arguments.megatron.record import Effect, MegatronFlag, MegatronGroup
from arguments.megatron.table import TABLE, WithoutEffect

DEST = "without effect"  # of argparse's namespace; no flag's key has a blank
_TITLES = {
    Effect.ACCEPTED: "Megatron's, accepted without effect",
    Effect.RESTRICTED: "Megatron's",
    Effect.REFUSED: "Megatron's, refused",
}


class _TakeAction(argparse.Action):
    """Checks what a flag is given, and notes that it has no effect."""

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
    """Add the flags of a table to a parser; families stay out, since argparse knows whole names only.

    Returns:
        The flags that were added.
    """
    added = []
    for one in groups:
        section = parser.add_argument_group(f"{_TITLES[one.effect]}: {one.title}", one.common_reason)
        for flag in one.flags:
            if flag.is_family:
                continue
            section.add_argument(
                flag.name, dest=DEST, action=_TakeAction, flag=flag, nargs=_nargs(flag), **_shown(flag, one)
            )
            added.append(flag.name)
    return added


def take(flag: MegatronFlag, value: object, into: WithoutEffect) -> None:
    """Note a flag of a YAML file.

    Args:
        flag: Of the table.
        value: As read: true for a flag alone, a value, or a list of values.
        into: Where it is collected.

    Raises:
        ConfigError: It is refused, or its values are.
        ValueError: A value where there is none, or none where there is one.
    """
    if flag.effect is Effect.REFUSED:
        flag.check([])
    if flag.count == 0:
        if value is not True:
            raise ValueError(f"{value!r} is not true, and the flag takes no value; leave it out if it is not wanted")
        into.add(flag, [])
        return
    values = value if isinstance(value, list) else [value]
    if not values or value is None or (flag.count == 1 and isinstance(value, list)):
        raise ValueError(f"{value!r} is not {'one value' if flag.count == 1 else 'a value or a list of them'}")
    into.add(flag, [str(item) for item in values])


def _nargs(flag: MegatronFlag) -> int | str | None:
    if flag.effect is Effect.REFUSED:
        return "*"  # whatever it is given, the reason is what is said
    return {0: 0, 1: None, None: "+"}[flag.count]


def _shown(flag: MegatronFlag, within: MegatronGroup) -> dict[str, Any]:
    """Metavar and help, as `add_argument` takes them."""
    shown: dict[str, Any] = {} if within.common_reason else {"help": flag.why.replace("%", "%%")}
    if flag.allowed:
        shown["metavar"] = "{" + ",".join(flag.allowed) + "}"
    elif _nargs(flag) != 0:
        shown["metavar"] = "TEXT"
    return shown
