"""A YAML file of flags: `--model-config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from arguments.flags import Flag, FlagGroup, normalize_key
from megatron_ext.errors import ConfigError

_OWN_KEY = "model-config"


def read_flags(path: str, known: Mapping[str, tuple[FlagGroup, Flag]]) -> dict[str, Any]:
    """Read the flags of a YAML file.

    Args:
        path: The file: one mapping from flag names, with dashes or underscores, to values.
        known: The flags there are, by key.

    Returns:
        Values by key.

    Raises:
        ConfigError: If the file cannot be read, or a key or a value is wrong; names file, line and key.
    """
    values: dict[str, Any] = {}
    for line, name, value in _entries(path):
        where = f"{path}, line {line}"
        key = normalize_key(name)
        if key not in known or key == _OWN_KEY:
            raise ConfigError(f"{where}: {name!r} is no flag that the file can hold{_suggestion(key, known)}")
        group, flag = known[key]
        if flag.key in values:
            raise ConfigError(f"{where}: {name!r} is given twice")
        try:
            values[flag.key] = group.parse_value(flag, value)
        except ValueError as error:
            raise ConfigError(f"{where}: {name}: {error}") from None
    return values


def _entries(path: str) -> list[tuple[int, str, Any]]:
    """The (line, key, value) triples of the file's top-level mapping, in its order."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: not a mapping of flags to values, as in 'hidden-size: 256'")
        return [
            (key.start_mark.line + 1, str(key.value), loader.construct_object(value, deep=True))
            for key, value in root.value
        ]
    except OSError as error:
        raise ConfigError(f"--model-config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--model-config {path}: not a text file in UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}, line {line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None


def _suggestion(key: str, known: Mapping[str, tuple[FlagGroup, Flag]]) -> str:
    close = difflib.get_close_matches(key, [name for name in known if name != _OWN_KEY], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
