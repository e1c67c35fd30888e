"""YAML file of flags: `--model-config`, a mapping of flags to values.

Reading a file, even a hostile one, takes work in proportion to its size, which is bounded (SE-1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import yaml

from arguments.flags import Flag, closest, normalize_key, shorten, shown
from arguments.megatron.flag_table import MegatronFlag, family_of, take
from arguments.parsed_flags import ParsedFlags
from arguments.removed import refuse_removed
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_text

LONGEST_FILE = 256 * 1024  # bytes
_OWN_KEY = "model-config"
_MAX_LEVELS = 3  # the mapping, a list, its items
_VALUE_LEVEL = 2
_MAX_NODES = 10_000
_LONGEST_NUMBER = 64  # characters; a date is one of the kinds too
_TEST_CASE_KEY = "MODEL_ARGS"
_TEST_CASE_REFUSED = (
    f"{_TEST_CASE_KEY} of Megatron's functional tests was removed in 0.3.0: write its flags as keys of this file, "
    "without dashes in front, or on the command line"
)
_STRING = "tag:yaml.org,2002:str"
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in "str int float bool null timestamp seq map".split()}


def read_flags(path: str, known: Mapping[str, Flag], megatrons: Mapping[str, MegatronFlag]) -> ParsedFlags:
    """Read the flags of a YAML file.

    Args:
        path: The file: one mapping from flag names, with dashes or underscores, to values.
        known: Known flags, by key.
        megatrons: Megatron's flags without a field, by key.

    Raises:
        ConfigError: If the file cannot be read, or a key or a value is wrong; names file, line and key.
    """
    loader, pairs = _top_level(path)
    given = ParsedFlags()
    for node, value in pairs:
        where, name = f"{path}, line {node.start_mark.line + 1}", node.value
        key = normalize_key(name)
        try:
            if key in megatrons:
                take(megatrons[key], loader.value_of(value), given.without_effect)
                continue
            refuse_removed(key, value.value if isinstance(value, yaml.ScalarNode) else None)
            flag = _flag_of(key, known, megatrons)
            if flag.key in given.values:
                raise ConfigError(f"{name!r} is given twice")
            given.values[flag.key] = flag.parse_value(loader.value_of(value))
            if key in flag.keys[1:]:
                given.typed[flag.key] = f"--{key}"
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{where}: {name}: {error}") from None
    return given


def _flag_of(key: str, known: Mapping[str, Flag], megatrons: Mapping[str, MegatronFlag]) -> Flag:
    """Return the flag of a key.

    Raises:
        ConfigError: The key is unknown, or its flag is not allowed in a file.
    """
    if key in known and key != _OWN_KEY:
        return known[key]
    family = family_of(f"--{key}")
    if family is not None:
        family.check([], f"--{key}")
    meant = closest(key, (other for other in known if other != _OWN_KEY), megatrons)
    hint = f"; did you mean {meant!r}?" if meant else ""
    raise ConfigError(f"{shown(key)} is not a flag that the file may contain{hint}")


class _Unfit(yaml.MarkedYAMLError):
    """Raised for YAML that is not a file of flags."""


class _FlagLoader(yaml.SafeLoader):
    """YAML loader limited to files of flags: a mapping of values and of lists of values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._count = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Compose one node, and recursively the nodes in it."""
        event = self.peek_event()
        self._count += 1
        self._depth += 1
        if self._depth == _VALUE_LEVEL and isinstance(index, yaml.ScalarNode) and index.value == _TEST_CASE_KEY:
            raise _Unfit(problem=_TEST_CASE_REFUSED, problem_mark=index.start_mark)
        if self._depth > _MAX_LEVELS:
            raise _Unfit(problem="nesting is deeper than a list of values", problem_mark=event.start_mark)
        if self._count > _MAX_NODES:
            raise _Unfit(problem=f"more than {_MAX_NODES} keys and values", problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def value_of(self, node: yaml.Node) -> object:
        """Return a scalar, or a list of scalars: an alias is the same object again, so expansion cannot multiply.

        Raises:
            ValueError: The node is something else.
        """
        if node.tag not in _PLAIN_TAGS:
            raise ValueError(
                f"its YAML type {node.tag!r} is not a value of a flag; write a text, a number, true or false"
            )
        if isinstance(node, yaml.SequenceNode):
            if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
                raise ValueError("a list may have single values only")
            return [self.value_of(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            raise ValueError("a mapping is not a value of a flag; write a value or a list of values")
        if node.tag != _STRING and len(node.value) > _LONGEST_NUMBER:
            raise ValueError(f"{shown(node.value)} is too long for a number; put a text into quotes")
        return self.construct_object(node)


def _top_level(path: str) -> tuple[_FlagLoader, Sequence[tuple[yaml.Node, yaml.Node]]]:
    """Return the file's loader, which converts nodes to values, and the pairs of its top-level mapping in order."""
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
    pairs = root.value if root is not None else []
    for key, _ in pairs:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{path}, line {key.start_mark.line + 1}: the key is not the name of a flag")
    return loader, pairs
