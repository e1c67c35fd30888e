"""From an argument list to the dataclasses: flag > YAML file > what the checkpoint says > default."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from arguments.flags import Flag, FlagGroup
from arguments.groups import BATCHING, CACHE, GROUPS, MODEL, PARALLEL, RUN, SAMPLING, SOURCE
from arguments.yaml_file import read_flags
from megatron_ext.config import (
    BatchingConfig,
    CacheConfig,
    InferenceSettings,
    ModelConfig,
    ParallelConfig,
    RequestParams,
    RunConfig,
    SourceConfig,
)
from megatron_ext.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The parser with every flag. It raises `ConfigError` where argparse would print its usage and exit."""
    parser = _Parser(
        prog=prog,
        description="Run prompts through the dynamic inference engine and print a table. "
        "Without flags: the embedded model on the shipped example prompts.",
        epilog="Exit codes: 0 done, 1 a request failed, 2 bad usage.",
        allow_abbrev=False,
    )
    for group in GROUPS:
        group.add_to(parser)
    return parser


def parse_arguments(argv: Sequence[str] | None = None, prog: str | None = None) -> InferenceSettings:
    """Parse an argument list.

    Args:
        argv: Arguments without the program's name; None for the process's own.
        prog: Name of the program for `--help`.

    Raises:
        ConfigError: For anything that can be known to be wrong before a file other than the YAML one is opened.
    """
    given = vars(build_parser(prog).parse_args(argv))
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    if "model-config" in values:
        values = read_flags(values["model-config"], known_flags()) | values
    settings = InferenceSettings(
        source=SourceConfig(**_fields(SOURCE, values)),
        model_overrides=_fields(MODEL, values),
        parallel=ParallelConfig(**_fields(PARALLEL, values)),
        sampling=RequestParams(**_fields(SAMPLING, values)),
        batching=BatchingConfig(**_fields(BATCHING, values)),
        cache=CacheConfig(**_fields(CACHE, values)),
        run=RunConfig(**_fields(RUN, values)),
    )
    if settings.source.load is None and settings.source.load_hf is None:
        ModelConfig(**settings.model_overrides)  # raises what is wrong with it before anything is loaded
    return settings


def known_flags() -> dict[str, tuple[FlagGroup, Flag]]:
    """Every flag with its group, by key."""
    return {key: (group, flag) for group in GROUPS for flag in group.flags for key in flag.keys}


def _fields(group: FlagGroup, values: Mapping[str, Any]) -> dict[str, Any]:
    return {flag.field: values[flag.key] for flag in group.flags if flag.key in values}
