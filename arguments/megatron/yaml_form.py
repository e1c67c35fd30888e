"""YAML files in the form of Megatron-LM's functional tests: flags under `MODEL_ARGS`, and settings of the run.

Each flag is parsed like the command line that Megatron's shell script makes of it, so that no rule is written twice:
variables are substituted, and each value passes through `xargs`. Scripts in the file are refused, since a file runs no
code (SE-1).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import yaml

from arguments.flags import closest, shown
from arguments.parsed_flags import ParsedFlags
from megatron_ext.errors import ConfigError

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_BLANKS = " \t\n"
# Parts of a word of xargs: a backslash and the next character, a quoted text, or ordinary characters.
_PART = re.compile(
    r"""\\(?P<escaped>.)|"(?P<double>[^"\n]*)"|'(?P<single>[^'\n]*)'|(?P<plain>[^\\"' \t\n]+)""", re.DOTALL
)


def with_variables(text: str, environment: Mapping[str, str]) -> str:
    """Return the text with `${NAME}` replaced by the environment's value.

    Raises:
        ValueError: A variable is not set; names the variable.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in environment:
            raise ValueError(f"${{{name}}} is not set in the environment; export {name} first")
        return environment[name]

    return _VARIABLE.sub(value, text)


def as_xargs(text: str) -> str:
    """Return the text as `xargs` would pass it: words without their quotes, one blank between them.

    A backslash escapes the next character, except inside quotes. A text with an unclosed quote is unchanged: xargs
    refuses it, but an apostrophe is not a mistake.
    """
    words: list[str] = []
    position, in_word = 0, False
    while position < len(text):
        if text[position] in _BLANKS:
            position, in_word = position + 1, False
            continue
        part = _PART.match(text, position)
        if part is None:
            return text
        if not in_word:
            words.append("")
        words[-1] += next(piece for piece in part.groups() if piece is not None)
        position, in_word = part.end(), True
    return " ".join(words)


def arguments_of(text: str) -> list[str]:
    """Return the arguments of a value: the value itself, with its blanks, or each word of a `[list of words]`."""
    text = as_xargs(text)
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1].split()
    return [text]


Parse = Callable[[Sequence[str]], ParsedFlags]
Pairs = Sequence[tuple[yaml.Node, yaml.Node]]

FLAGS, VARIABLES, MODE = "MODEL_ARGS", "ENV_VARS", "MODE"
_PASSED_OVER = ("TEST_TYPE", "METRICS", "LAUNCHER", "INFERENCE_COMPARISON", "PREFIX_CACHE_SCENARIO")
_REFUSED = {
    "MODEL_ARGS_2": "it has the flags of a second run, and a file describes one run; merge them into MODEL_ARGS",
    "BEFORE_SCRIPT": "it is a shell script, and a file runs no code; run it before, and leave the key out",
    "AFTER_SCRIPT": "it is a shell script, and a file runs no code; run it afterwards, and leave the key out",
}
TOP_LEVEL = (FLAGS, VARIABLES, MODE, *_PASSED_OVER, *_REFUSED)
_OURS = "inference"
# Variables that libraries read at start, and that do not name a file or a module to load.
EXPORTED = frozenset(
    "CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS MAMBA_DETERMINISTIC NCCL_ALGO NCCL_DEBUG NCCL_NVLS_ENABLE "
    "NCCL_PROTO NVTE_ALLOW_NONDETERMINISTIC_ALGO NVTE_BWD_LAYERNORM_SM_MARGIN NVTE_FLASH_ATTN NVTE_FUSED_ATTN "
    "NVTE_FWD_LAYERNORM_SM_MARGIN NVTE_UNFUSED_ATTN OMP_NUM_THREADS PYTORCH_CUDA_ALLOC_CONF "
    "TORCH_NCCL_AVOID_RECORD_STREAMS TRITON_CACHE_AUTOTUNING".split()
)
_UNKNOWN_FIELDS = "ignore-unknown-prompt-fields"  # as in Megatron, whose prompt files have more fields
_NEVER = ("--help", "-h", "--model-config")
_NULL, _BOOL = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool"))


def is_megatrons(pairs: Pairs) -> bool:
    """Return whether a file's top-level mapping has Megatron's form."""
    return any(key.value in TOP_LEVEL for key, _ in pairs)


def read(path: str, pairs: Pairs, parse: Parse) -> ParsedFlags:
    """Return the flags of a file.

    Args:
        pairs: Top-level mapping of the file.

    Raises:
        ConfigError: A key or a value is wrong or unsupported; names file and line.
    """
    given = ParsedFlags({_UNKNOWN_FIELDS: True})
    for key, value in pairs:
        where, name = f"{path}, line {key.start_mark.line + 1}", str(key.value)
        if name in _REFUSED:
            _require(_is_empty(value), f"{where}: {name} is refused: {_REFUSED[name]}")
        elif name == MODE:
            _require(value.value == _OURS, f"{where}: {name} {shown(value.value)} is refused: only {_OURS!r} runs here")
        elif name == FLAGS:
            for entry in _mapping(where, name, value):
                given = _flag(entry, parse).over(given)
        elif name == VARIABLES:
            for entry in _mapping(where, name, value):
                _variable(entry, given)
        elif name not in _PASSED_OVER:
            meant = closest(name, TOP_LEVEL)
            hint = f"; did you mean {meant!r}?" if meant else f"; flags belong under {FLAGS}"
            raise ConfigError(f"{where}: {shown(name)} is not a key of a file with {FLAGS}{hint}")
    return given


@dataclass(frozen=True)
class _Entry:
    """Key of a mapping, and its value."""

    where: str  # the line, for messages
    name: str
    value: yaml.Node


def _mapping(where: str, name: str, node: yaml.Node) -> Iterator[_Entry]:
    if _is_empty(node):
        return
    _require(isinstance(node, yaml.MappingNode), f"{where}: {name} is not a mapping of names to values")
    file = where.rpartition(", line ")[0]
    for key, value in node.value:
        line = f"{file}, line {key.start_mark.line + 1}"
        _require(isinstance(key, yaml.ScalarNode), f"{line}: the key is not a name")
        yield _Entry(line, key.value, value)


def _flag(entry: _Entry, parse: Parse) -> ParsedFlags:
    name, where = entry.name, entry.where
    _require(
        name.startswith("--") and name not in _NEVER, f"{where}: {shown(name)} is not a flag that the file may contain"
    )
    try:
        words = _words(entry.value)
        if words is None:
            return ParsedFlags()
        return parse([name, *words] if len(words) != 1 else [f"{name}={words[0]}"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {name}: {error}") from None


def _words(node: yaml.Node) -> list[str] | None:
    """Return the arguments after a flag; empty for a flag alone, None for a flag that is dropped.

    Raises:
        ValueError: The value is not valid, or a variable is not set.
    """
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise ValueError("a list may have single values only")
        return [word for item in node.value for word in as_xargs(_text(item)).split()]
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("a mapping is not a value of a flag; write a value or a list of values")
    if _is_empty(node):
        return None
    arguments = arguments_of(_text(node))
    if node.tag == _BOOL and arguments == ["false"]:
        raise ValueError("false is not a value of a flag; leave the key out")
    if arguments == ["true"]:
        return []
    return None if arguments == [""] else arguments


def _text(node: yaml.ScalarNode) -> str:
    text = node.value.lower() if node.tag == _BOOL and node.value.lower() in ("true", "false") else node.value
    return with_variables(text, os.environ)


def _variable(entry: _Entry, given: ParsedFlags) -> None:
    if not isinstance(entry.value, yaml.ScalarNode):
        raise ConfigError(f"{entry.where}: {entry.name} is not a single value")
    if entry.name not in EXPORTED:
        given.without_effect.note(f"{entry.name} (export it yourself)")
        return
    try:
        given.environment[entry.name] = with_variables(entry.value.value, os.environ)
    except ValueError as error:
        raise ConfigError(f"{entry.where}: {entry.name}: {error}") from None


def _is_empty(node: yaml.Node) -> bool:
    return node.tag == _NULL or node.value == ""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
