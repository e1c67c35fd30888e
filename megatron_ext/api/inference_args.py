"""Engine settings from the argparse parser of another program, such as Megatron-LM's with an `extra_args_provider`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from arguments.flags import Flag, FlagGroup
from arguments.groups import GROUPS, MODEL, SOURCE, TOKENIZER
from arguments.megatron.flag_table import MegatronFlag, WithoutEffect, records
from arguments.megatron.synonyms import SYNONYMS, require_16_bits
from arguments.parsed_flags import ParsedFlags
from megatron_ext.api.loading import Setting, is_of_the_engine, read_settings
from megatron_ext.config import DTYPES
from megatron_ext.console.start import say_start
from megatron_ext.errors import ConfigError

RECORD = "inference_args_defaults"
"""Attribute of a parsed namespace: the parser's defaults of the flags that were not typed, by attribute."""
_SAVE = "save"  # Megatron's is the directory of the training's checkpoints
# Flags of the groups below that describe no model, and flags of another group that do.
_MODEL_GROUPS = (SOURCE, TOKENIZER, MODEL, SYNONYMS)
_NO_MODEL = {
    "seed",
    "inference-sampling-seed",
    "model-config",
    "disable-chunked-prefill",
    "inference-dynamic-batching-max-requests-override",
}
_STAGES = {"num-layers-in-first-pipeline-stage", "num-layers-in-last-pipeline-stage"}
_SAMPLING = ("temperature", "top-k", "top-p")
# Attributes of Megatron's namespace that are not named like their flags, and the value of a typed switch.
_ATTRIBUTES: Mapping[str, tuple[str, bool]] = {
    "norm-epsilon": ("layernorm_epsilon", True),
    "apply-layernorm-1p": ("layernorm_zero_centered_gamma", True),
    "disable-bias-linear": ("add_bias_linear", False),
    "fp8-format": ("fp8", True),
    "fp4-format": ("fp4", True),
    "no-fp8-wgrad": ("fp8_wgrad", False),
}
# Megatron's flags that are checked, or noted if they have no effect; the other accepted ones are not about inference.
_MEGATRONS = [
    flag
    for flag in records()
    if flag.kind == "refused" or flag.only or flag.refused_values or flag.name.startswith("--inference")
]
_DTYPES = dict(zip(("torch.float32", "torch.bfloat16", "torch.float16"), DTYPES, strict=True))


def add_inference_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of the engine to a parser, and return it; an `extra_args_provider` of Megatron-LM.

    >>> arguments = add_inference_args(argparse.ArgumentParser()).parse_args(["--load-hf", "model"])
    >>> settings_from_args(arguments)
    {'load_hf': 'model'}

    A flag that the parser has under one of its names stays the parser's, with its default. An added one is an attribute
    of the namespace like any other, and None if it is not typed. Call this after other flags have been added.

    Args:
        parser: Parser whose `parse_args` or `parse_known_args` then also leaves `inference_args_defaults` in the
            namespace, by which `settings_from_args` distinguishes defaults from typed values.
    """
    taken = _options(parser)
    for group in (*GROUPS, SYNONYMS):
        ours = [flag for flag in _engine_flags((group,)) if taken.keys().isdisjoint(flag.words)]
        if ours:
            section = parser.add_argument_group(f"megatron_ext: {group.title}")
            for flag in ours:
                flag.add_to(section.add_argument, as_attribute=True)
    parse = parser.parse_known_args

    def parse_known_args(
        args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        parsed, unknown = parse(words, namespace)
        setattr(parsed, RECORD, _untyped_defaults(parser, words))
        return parsed, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]  # an overload less
    return parser


def settings_from_args(namespace: argparse.Namespace, *, attach: bool = False) -> dict[str, Setting]:
    """Return the settings for `load_engine`, or for `attach_engine`, in a parsed namespace.

    A flag counts if it was typed, or if its value is not the parser's default. Logs one line with the flags of
    Megatron's inference that were typed and have no effect.

    Args:
        namespace: Namespace that a parser with `add_inference_args` has returned; later changes count.
        attach: Leave out what describes a model: weights, tokenizer, sizes, type of the parameters, layers of stages.

    Returns:
        Keyword arguments, by the names of the flags.

    Raises:
        ConfigError: The parser had no `add_inference_args`; or a flag has a value that cannot be honoured.
    """
    if not hasattr(namespace, RECORD):
        raise ConfigError(
            f"the namespace has no {RECORD}; pass add_inference_args to the parser before it parses, as in "
            "parse_args(extra_args_provider=add_inference_args)"
        )
    counting = _Counting(namespace)
    given = ParsedFlags(counting.values(), counting.without_effect())
    require_16_bits(given)
    if attach:
        for key in {flag.key for flag in _engine_flags(_MODEL_GROUPS)} - _NO_MODEL | _STAGES:
            given.values.pop(key, None)
    settings: dict[str, Any] = {key.replace("-", "_"): value for key, value in given.values.items()}
    read_settings(settings)
    say_start(given.without_effect.lines())
    return settings


class _Counting:
    """Values of a namespace that a user has set.

    Args:
        namespace: Parsed namespace with a record of defaults.
    """

    def __init__(self, namespace: argparse.Namespace) -> None:
        self._values = vars(namespace)
        self._defaults: Mapping[str, object] = self._values[RECORD]

    def values(self) -> dict[str, object]:
        """Return the values of this package's flags that count, by key."""
        found: dict[str, object] = {}
        sampling = any(self._counts(key.replace("-", "_")) for key in _SAMPLING)
        for flag in _engine_flags():
            values = {key: self._value(key, flag, sampling and key in _SAMPLING) for key in flag.keys}
            present = {key: value for key, value in values.items() if value is not None}
            if any(value != present[key] for value in present.values() for key in present):
                both = " and ".join(f"--{key} {value}" for key, value in present.items())
                raise ConfigError(f"{both} contradict each other; give one of them")
            if present:
                found[flag.key] = next(iter(present.values()))
        return found

    def without_effect(self) -> WithoutEffect:
        """Return the typed flags of Megatron's table that have no effect, and check the others.

        Raises:
            ConfigError: One of the table's flags is refused.
        """
        noted = WithoutEffect()
        for flag in _MEGATRONS:
            for name in self._attributes(flag):
                words = self._words(flag, name)
                if words is None:
                    continue
                flag.check(words, f"--{name.replace('_', '-')}" if flag.is_family else None)
                is_typed = name not in self._defaults
                if flag.unless or (is_typed and not flag.only):
                    noted.add(flag, words)
        return noted

    def _counts(self, name: str) -> bool:
        value = self._values.get(name)
        return value is not None and (name not in self._defaults or _plain(value) != self._defaults[name])

    def _value(self, key: str, flag: Flag, is_forced: bool) -> object:
        """Return the value of a flag as the engine's settings have it; None if it does not count."""
        name, switch = _attribute(key)
        if not is_forced and not self._counts(name):
            return None
        value, kind = _plain(self._values.get(name)), flag.kind
        if kind.item is bool:
            return value is switch if isinstance(value, bool) else value
        if kind.length:
            return tuple(word for part in value for word in str(part).split())
        if kind.is_tuple:
            return tuple(value)
        return str(value) if kind.item is str and value is not None else value

    def _attributes(self, flag: MegatronFlag) -> list[str]:
        if flag.is_family:
            prefix = flag.name.strip("-*").replace("-", "_") + "_"
            return [name for name in self._values if name.startswith(prefix)]
        return [_attribute(flag.name.lstrip("-"))[0]]

    def _words(self, flag: MegatronFlag, name: str) -> list[str] | None:
        """Return the values of Megatron's flag; None if it does not count."""
        if not self._counts(name):
            return None
        value = self._values[name]
        if isinstance(value, bool):
            return [] if value is _attribute(flag.name.lstrip("-"))[1] else None
        return [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]


def _engine_flags(groups: Sequence[FlagGroup] = (*GROUPS, SYNONYMS)) -> Iterator[Flag]:
    return (flag for group in groups for flag in group.flags if is_of_the_engine(flag) and flag.field != _SAVE)


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in parser._actions for name in action.option_strings}


def _attribute(key: str) -> tuple[str, bool]:
    return _ATTRIBUTES.get(key, (key.replace("-", "_"), True))


def _untyped_defaults(parser: argparse.ArgumentParser, words: Sequence[str]) -> dict[str, object]:
    """Return the defaults of flags that `settings_from_args` reads, by attribute, unless they are among the words."""
    options = _options(parser)
    typed = {options[name].dest for name in (word.partition("=")[0] for word in words) if name in options}
    known = {word for flag in _engine_flags() for word in flag.words}
    known |= {name for name in options if any(flag.covers(name) for flag in _MEGATRONS)}
    defaults = {options[name].dest: parser.get_default(options[name].dest) for name in known & options.keys()}
    return {name: _plain(value) for name, value in sorted(defaults.items()) if name not in typed}


def _plain(value: Any) -> Any:
    """Return the value, or the name of the type that Megatron-LM makes of it when it checks its arguments."""
    return _DTYPES.get(str(value), value)
