"""Parsing of an argument list into dataclasses: flag > YAML file > checkpoint > default."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from arguments.flags import Flag, FlagGroup, closest, normalize_key, shorten
from arguments.groups import (
    ACCESS,
    ENGINE,
    GROUPS,
    KV_EVENTS,
    LIMITS,
    MODEL,
    RUN,
    SAMPLING,
    SERVER,
    SERVER_GROUPS,
    SOURCE,
    TOKENIZER,
)
from arguments.help import HelpAction
from arguments.megatron.flag_table import (
    DEST,
    SERVER_TABLE,
    TABLE,
    MegatronGroup,
    WithoutEffect,
    add_to,
    family_of,
    records,
)
from arguments.megatron.layer_flags import describe_attention, describe_layers
from arguments.megatron.synonyms import SYNONYMS, require_16_bits, translate, without_checkpoint
from arguments.parsed_flags import ParsedFlags, note_no_effect
from arguments.removed import refuse_removed_words
from arguments.yaml_file import read_flags
from megatron_ext.config import (
    InferenceSettings,
    RequestParams,
    RunConfig,
    ServerConfig,
    ServerLimits,
    ServerSettings,
    SourceConfig,
)
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.differences import check_flags
from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.config.model_folder import is_megatrons, require_model_folder
from megatron_ext.errors import ConfigError, MachineError

_FOLDER = "folder of the model"  # name in argparse's namespace; no flag's key has a blank


class CommandLine(argparse.ArgumentParser):
    """argparse parser that raises `ConfigError` where argparse would print its usage and exit."""

    known: Sequence[str] = ()  # flags, as they are typed
    known_without_effect: Sequence[str] = ()  # Megatron's flags

    def error(self, message: str) -> NoReturn:
        """Raise the message as `ConfigError`."""
        raise ConfigError(message)

    def parse_args(  # type: ignore[override]  # overloaded in the base
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse as the base class does; refuse removed flags, and suggest a known flag for an unknown one.

        A single word that belongs to no flag is the model's folder. It is no positional argument of argparse, which
        would take the value of an unknown flag for it.
        """
        refuse_removed_words(sys.argv[1:] if args is None else args)
        parsed, unknown = self.parse_known_args(args, namespace)
        if len(unknown) == 1 and not unknown[0].startswith("-"):
            setattr(parsed, _FOLDER, unknown.pop())
        if unknown:
            self.error(unrecognized(unknown, self.known, self.known_without_effect))
        return parsed


def build_parser(prog: str | None = None) -> CommandLine:
    """Return the parser of `run_inference.py`. It raises `ConfigError` where argparse would exit."""
    return _build(
        GROUPS,
        TABLE,
        prog,
        "Run prompts through the dynamic inference engine and print a table. DIR is the folder of a model in Hugging "
        "Face's form or Megatron's. Without flags: the embedded model on the shipped example prompts.",
        "Exit codes: 0 done, 1 a request failed or results could not be written, 2 bad usage, "
        "130 ended by SIGINT, 143 by SIGTERM.",
        (
            'DIR --prompts "What does a generator do?" --num-tokens-to-generate 100',
            "DIR --prompt-file prompts.jsonl --output-path results.json",
            "DIR --dry-run",
        ),
    )


def build_server_parser(prog: str | None = None) -> CommandLine:
    """Return the parser of `megatron-ext serve`, with errors as in `build_parser`."""
    return _build(
        SERVER_GROUPS,
        SERVER_TABLE,
        prog,
        "Serve a model over HTTP as OpenAI's API does. DIR is the folder of a model in Hugging Face's form or "
        "Megatron's. Without flags: the embedded model on the loopback address.",
        "SIGINT or SIGTERM: no new requests are admitted and running ones finish; a second signal cancels them. "
        "Exit codes: 0 stopped, 2 bad usage.",
        ("DIR", "DIR --host 0.0.0.0 --api-key-file keys.txt", "DIR --prefix-cache-dir /var/cache/prefixes"),
    )


def unrecognized(unknown: Sequence[str], options: Sequence[str], others: Sequence[str]) -> str:
    """Return the error for unknown flags, with the known flags that were probably meant."""
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    for flag in flags:
        family = family_of(flag)
        if family is not None:
            family.check([], shorten(" ".join(unknown)) if len(flags) == 1 else flag)
    meant = {flag: closest(flag, options, others) for flag in flags}
    hints = ", ".join(f"{option} for {flag}" if len(flags) > 1 else option for flag, option in meant.items() if option)
    return f"unrecognized arguments: {shorten(' '.join(unknown))}" + (f"; did you mean {hints}?" if hints else "")


def _build(
    groups: Sequence[FlagGroup],
    table: Sequence[MegatronGroup],
    prog: str | None,
    description: str,
    epilog: str,
    examples: Sequence[str],
) -> CommandLine:
    parser = CommandLine(
        prog=prog,
        usage="%(prog)s [DIR] [FLAG ...]",
        description=description,
        epilog=epilog,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action=HelpAction, groups=groups, examples=examples)
    for group in (*groups, SYNONYMS):
        group.add_to(parser)
    parser.known = [name for one in (*groups, SYNONYMS) for flag in one.flags for name in flag.names]
    parser.known_without_effect = add_to(parser, table)
    return parser


def parse_arguments(argv: Sequence[str] | None = None, prog: str | None = None) -> InferenceSettings:
    """Parse an argument list of `run_inference.py`.

    Args:
        argv: Arguments without the program's name; None for the process's own.
        prog: Name of the program for `--help`.

    Raises:
        ConfigError: For any error that can be detected before a file other than the YAML one is opened.
    """
    return _settings(_given(build_parser(prog), argv, GROUPS, TABLE))


def settings_of(values: FieldValues) -> InferenceSettings:
    """Return the settings of a run with these flag values, by key, which override a YAML file that they name."""
    return _settings(_completed(ParsedFlags(dict(values)), GROUPS, TABLE))


def _settings(given: ParsedFlags) -> InferenceSettings:
    values = given.values
    if any(flag.key in values for flag in ACCESS.flags):  # a run has no answers to parse
        given.without_effect.note("--parsers")
    sampling = SAMPLING.fields(values)
    settings = InferenceSettings(
        **_engine_settings(given),
        sampling=RequestParams(**sampling),
        sampling_given=sampling,
        run=RunConfig(**RUN.fields(values)),
    )
    _check_whole(settings)
    return settings


def _engine_settings(given: ParsedFlags) -> dict[str, Any]:
    """Return the settings that a run and a server have in common."""
    return {
        "source": _source(given),
        "model_overrides": MODEL.fields(given.values),
        **{name: group.config(**group.fields(given.values)) for name, group in ENGINE.items()},
        "start_notes": given.without_effect.lines(),
    }


def parse_server_arguments(argv: Sequence[str] | None = None, prog: str | None = None) -> ServerSettings:
    """Parse an argument list of `megatron-ext serve`; otherwise as `parse_arguments`."""
    given = _given(build_server_parser(prog), argv, SERVER_GROUPS, SERVER_TABLE)
    values = given.values
    settings = ServerSettings(
        **_engine_settings(given),
        server=ServerConfig(
            limits=ServerLimits(**LIMITS.fields(values)),
            kv_events=KvEventsConfig(**KV_EVENTS.fields(values)),
            **SERVER.fields(values),
            **ACCESS.fields(values),
        ),
    )
    _check_whole(settings)
    return settings


def _given(
    parser: CommandLine, argv: Sequence[str] | None, groups: Sequence[FlagGroup], table: Sequence[MegatronGroup]
) -> ParsedFlags:
    """Return the flags from the command line, else from the YAML file."""
    given = _parse(parser, argv)
    folder = given.values.pop(_FOLDER, None)
    if folder is not None:
        flag = "load" if is_megatrons(require_model_folder("DIR", str(folder))) else "load-hf"
        for key in ("load", "load-hf"):
            if given.values.get(key):
                raise ConfigError(f"{folder} and --{key} {given.values[key]} are two models; give one of them")
        given.values[flag] = folder
    return _completed(given, groups, table)


def _parse(parser: CommandLine, words: Sequence[str] | None) -> ParsedFlags:
    values = vars(parser.parse_args(words))
    without_effect = values.pop(DEST, None) or WithoutEffect()
    given = ParsedFlags(
        {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}, without_effect
    )
    names = {word.partition("=")[0] for word in (sys.argv[1:] if words is None else words)}
    given.typed = {flag.key: alias for flag in MODEL.flags for alias in flag.names[1:] if alias in names}
    return given


def _completed(given: ParsedFlags, groups: Sequence[FlagGroup], table: Sequence[MegatronGroup]) -> ParsedFlags:
    """Translate flags into this package's, and add the flags of the YAML file that they name."""
    given = translate(given)
    if "model-config" in given.values:
        megatrons = {normalize_key(flag.name): flag for flag in records(table) if not flag.is_family}
        path = str(given.values["model-config"])
        known = known_flags((*groups, SYNONYMS))
        try:
            given = given.over(translate(read_flags(path, known, megatrons)))
        except ConfigError as error:  # the file is on this machine
            raise MachineError(str(error)) from error
    without_checkpoint(given)
    describe_layers(given)
    describe_attention(given)
    require_16_bits(given)
    note_no_effect(given)
    return given


def _source(given: ParsedFlags) -> SourceConfig:
    values, fields = given.values, dict(SOURCE.fields(given.values))
    known = known_flags((MODEL, SYNONYMS))
    names = [normalize_key(str(name)) for name in fields.pop("override_checkpoint_args", ())]
    if names and "load_hf" in fields:
        raise ConfigError(
            f"--override-checkpoint-args {' '.join(names)} is for --load; --hf-overrides changes the fields of "
            f"{fields['load_hf']}"
        )
    for name in names:
        if name not in known:
            meant = closest(name, known)
            hint = f"; did you mean {meant}?" if meant else ""
            raise ConfigError(f"--override-checkpoint-args {shorten(name)} is not a flag of a model{hint}")
    allowed = tuple(known[name].key for name in names)
    typed = {
        flag.field: given.typed.get(flag.key, f"{flag.option} {values[flag.key]}")
        for flag in MODEL.flags
        if flag.key in values and (flag.key in given.typed or flag.declared.flag)
    }
    return SourceConfig(
        **fields, **TOKENIZER.fields(values), override_checkpoint_args=allowed, typed=tuple(typed.items())
    )


def _check_whole(settings: InferenceSettings | ServerSettings) -> None:
    """Check flags that depend on each other, before anything is loaded."""
    tool, ranks = settings.run if isinstance(settings, InferenceSettings) else settings.server, settings.parallel
    if tool.dry_run and ranks.smallest_world > 1:
        raise ConfigError(
            f"--dry-run plans a single rank, and the parallel sizes need {ranks.smallest_world}; leave them out"
        )
    if settings.source.load is None and settings.source.load_hf is None:
        check_flags(settings.model_overrides)


def known_flags(groups: Sequence[FlagGroup] = GROUPS) -> dict[str, Flag]:
    """Return every flag, by key."""
    return {key: flag for group in groups for flag in group.flags for key in flag.keys}
