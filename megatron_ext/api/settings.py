"""Settings from keyword arguments: named like the command line's flags, or like the fields that the flags set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from arguments.flags import Flag, FlagGroup, closest, shown
from arguments.groups import GROUPS
from arguments.megatron.synonyms import SYNONYMS
from arguments.parser import settings_of
from arguments.removed import refuse_removed
from megatron_ext.config import InferenceSettings, RunConfig
from megatron_ext.config.annotations import MismatchError
from megatron_ext.errors import ConfigError

Setting: TypeAlias = str | int | float | bool | os.PathLike[str] | Sequence[str] | Mapping[str, object] | None

_LOG_INTERVAL = "inference_logging_step_interval"  # the only field of a run that the engine uses


def known_names() -> dict[str, tuple[FlagGroup, Flag]]:
    """Return every name of a setting: `--inference-max-seq-length` is `inference_max_seq_length`.

    The field that a flag sets is a name, too, unless a flag has this name: `max_sequence_length`.
    """
    flags = [(group, flag) for group in (*GROUPS, SYNONYMS) for flag in group.flags]
    names = {key.replace("-", "_"): (group, flag) for group, flag in flags for key in flag.keys}
    for group, flag in flags:
        names.setdefault(flag.field, (group, flag))
    return names


def is_of_the_engine(group: FlagGroup, flag: Flag) -> bool:
    """Return whether a flag is for the engine; other flags control prompts and results of the tool."""
    return group.config is not RunConfig or flag.field == _LOG_INTERVAL


def read_settings(given: Mapping[str, Setting]) -> InferenceSettings:
    """Return the settings of keyword arguments, which override a file named by `model_config`.

    Raises:
        ConfigError: A name is unknown or was removed, a value has the wrong type, or the command line would refuse it.
    """
    known = known_names()
    values: dict[str, object] = {}
    for name, value in given.items():
        refuse_removed(name, value if isinstance(value, str) else None, name)
        group, flag = _found(name, known)
        if flag.key in values:
            raise ConfigError(f"{name} {shown(value)} is given twice, as {flag.field} too; give one of them")
        values[flag.key] = _checked(name, value, group, flag)
    settings = settings_of({key: value for key, value in values.items() if value is not None})
    _refuse_run_settings(settings.run)
    return settings


def _found(name: str, known: Mapping[str, tuple[FlagGroup, Flag]]) -> tuple[FlagGroup, Flag]:
    if name not in known:
        engine_flags = [other for other, pair in known.items() if is_of_the_engine(*pair)]
        meant = closest(name, engine_flags)
        hint = f"did you mean {meant}?" if meant else "megatron-ext run --help=all lists the names"
        raise ConfigError(f"{name} is not a setting of an engine; {hint}")
    group, flag = known[name]
    if not is_of_the_engine(group, flag):
        raise ConfigError(f"{name} {_RUN_ONLY}")
    return group, flag


_RUN_ONLY = "is a setting of megatron-ext run only; leave it out, and pass prompts to generate()"


def _checked(name: str, value: Setting, group: FlagGroup, flag: Flag) -> object:
    """Return the value converted to the type of the flag's field; None if not given."""
    kind = group.kind(flag)
    if isinstance(value, os.PathLike) and kind.item is str:
        value = os.fspath(value)
    try:
        converted = kind.convert(value)
    except MismatchError as error:
        raise ConfigError(f"{name} {shown(value)} is not {error}") from None
    if flag.choices and converted is not None and converted not in flag.choices:
        raise ConfigError(f"{name} {shown(value)} is unknown; one of {', '.join(flag.choices)}")
    return converted


def _refuse_run_settings(run: RunConfig) -> None:
    """Refuse flags of the file that are not for the engine."""
    others = [name for name, value in vars(run).items() if name != _LOG_INTERVAL and value != getattr(RunConfig, name)]
    if others:
        raise ConfigError(f"{others[0]} in the file that model_config names {_RUN_ONLY}")
