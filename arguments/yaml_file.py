"""A YAML file of flags: `--model-config`.

Whoever wrote it, reading it takes work in proportion to its size, which is bounded (SE-1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import yaml

from arguments.flags import Flag, FlagGroup, closest, normalize_key, shorten, shown
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_text

LONGEST_FILE = 256 * 1024  # bytes
_OWN_KEY = "model-config"
_MOST_LEVELS = 3  # the mapping, a list, its items
_MOST_NODES = 10_000
_LONGEST_NUMBER = 64  # characters; a date is one of the kinds too
_STRING = "tag:yaml.org,2002:str"
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in "str int float bool null timestamp seq map".split()}


def read_flags(path: str, known: Mapping[str, tuple[FlagGroup, Flag]]) -> dict[str, object]:
    """Read the flags of a YAML file.

    Args:
        path: The file: one mapping from flag names, with dashes or underscores, to values.
        known: The flags there are, by key.

    Returns:
        Values by key.

    Raises:
        ConfigError: If the file cannot be read, or a key or a value is wrong; names file, line and key.
    """
    values: dict[str, object] = {}
    for line, name, make_value in _entries(path):
        where = f"{path}, line {line}"
        key = normalize_key(name)
        if key not in known or key == _OWN_KEY:
            suggestion = closest(key, (other for other in known if other != _OWN_KEY))
            hint = f"; did you mean {suggestion!r}?" if suggestion else ""
            raise ConfigError(f"{where}: {shown(name)} is no flag that the file can hold{hint}")
        group, flag = known[key]
        if flag.key in values:
            raise ConfigError(f"{where}: {name!r} is given twice")
        try:
            values[flag.key] = group.parse_value(flag, make_value())
        except ValueError as error:
            raise ConfigError(f"{where}: {name}: {error}") from None
    return values


class _Unfit(yaml.MarkedYAMLError):
    """YAML, but not what a file of flags looks like."""


class _FlagLoader(yaml.SafeLoader):
    """A loader that composes no more than a file of flags has: a mapping of values and of lists of values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._count = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Compose one node; what is in it comes through here too."""
        event = self.peek_event()
        self._count += 1
        self._depth += 1
        if self._depth > _MOST_LEVELS:
            raise _Unfit(problem="nested deeper than a list of values", problem_mark=event.start_mark)
        if self._count > _MOST_NODES:
            raise _Unfit(problem=f"more than {_MOST_NODES} keys and values", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def value_of(self, node: yaml.Node) -> object:
        """A scalar, or a list of scalars: an alias is one more time the same object, so nothing multiplies.

        Raises:
            ValueError: Anything else.
        """
        if node.tag not in _PLAIN_TAGS:
            raise ValueError(f"of the kind {node.tag!r}, which no flag takes")
        if isinstance(node, yaml.SequenceNode):
            if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
                raise ValueError("a list of anything but single values")
            return [self.value_of(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            raise ValueError("a mapping is not one value")
        if node.tag != _STRING and len(node.value) > _LONGEST_NUMBER:
            raise ValueError(f"{shown(node.value)} is longer than any number; put a text into quotes")
        return self.construct_object(node)


def _entries(path: str) -> Iterator[tuple[int, str, Callable[[], object]]]:
    """The (line, key, function that makes the value) triples of the file's top-level mapping, in its order."""
    try:
        text = read_text(path, LONGEST_FILE)
    except ConfigError as error:
        raise ConfigError(f"--model-config {error}") from None
    try:
        loader = _FlagLoader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        kind = "" if isinstance(error, _Unfit) else "not YAML: "
        raise ConfigError(f"{path}, line {line}: {kind}{shorten(error.problem or '')}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {shorten(' '.join(str(error).split()))}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: not a mapping of flags to values, as in 'hidden-size: 256'")
    for key, value in root.value if root is not None else ():
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}, line {line}: a key that is not the name of a flag")
        yield line, key.value, functools.partial(loader.value_of, value)
