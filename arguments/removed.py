"""Names of earlier versions that are refused with what to use in their place: flags, values of flags, commands.

They are listed in `removed.yaml`, beside this module.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from arguments.flags import normalize_key
from megatron_ext.errors import ConfigError

VERSION = "0.3.0"  # that removed them


@functools.cache
def removed(kind: str) -> Mapping[str, object]:
    """Return the removed names of a kind.

    Args:
        kind: `flags`, `simulate` (flags of that command) or `commands`, texts by name; or `values`, by flag and value.
    """
    names: Mapping[str, Mapping[str, object]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return names[kind]


def refuse_removed_words(words: Sequence[str], kind: str = "flags") -> None:
    """Refuse removed flags and values in an argument list, before a parser that does not know them.

    Args:
        kind: See `removed`.
    """
    for word, following in pairwise((*words, "")):
        flag, sign, value = word.partition("=")
        if flag.startswith("--"):
            refuse_removed(flag, value if sign else following, kind=kind)


def refuse_removed(flag: str, value: object = None, name: str | None = None, kind: str = "flags") -> None:
    """Refuse a removed flag, or a removed value of a flag.

    Args:
        flag: Flag as typed, or its key.
        value: Value of the flag; None to check the flag alone.
        name: Name in the message; by default the flag.
        kind: See `removed`.
    """
    flag = f"--{normalize_key(flag)}"
    flags, values = removed(kind), removed("values")
    if flag in flags:
        raise ConfigError(_message(name or flag, flags[flag]))
    texts = values.get(flag)
    if isinstance(texts, Mapping) and value in texts:
        raise ConfigError(_message(f"{name or flag} {value}", texts[value]))


def refuse_removed_command(name: str) -> None:
    """Refuse a command that was removed."""
    commands = removed("commands")
    if name in commands:
        raise ConfigError(_message(f"megatron-ext {name}", commands[name]))


def _message(name: str, text: object) -> str:
    return f"{name} was removed in {VERSION}: {text}"
