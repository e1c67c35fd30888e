"""Engine loading from keyword arguments, or around a model in memory, on one rank or several.

Settings are named like the command line's flags, or like the fields that the flags set. Heavy
modules are imported after the settings have been checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from arguments.flags import Flag, closest, shown
from arguments.groups import GROUPS
from arguments.megatron.synonyms import SYNONYMS
from arguments.parser import settings_of
from arguments.removed import refuse_removed
from megatron_ext.config import InferenceSettings, ParallelConfig, RunConfig, SourceConfig
from megatron_ext.config.annotations import MismatchError
from megatron_ext.config.model_fields import ModelFields
from megatron_ext.config.source import TokenizerConfig
from megatron_ext.errors import ConfigError
from megatron_ext.memory.host_limits import check_address_space

if TYPE_CHECKING:
    from megatron_ext.api.engine import AttachedEngine, EngineFollower, LoadedEngine
    from megatron_ext.models.load import LoadedModel
    from megatron_ext.parallel.parallel_context import ParallelContext

Setting: TypeAlias = str | int | float | bool | os.PathLike[str] | Sequence[str] | Mapping[str, object] | None

_LOG_INTERVAL = "inference_logging_step_interval"  # the only field of a run that the engine uses
_RUN_ONLY = "is a setting of megatron-ext run only; leave it out, and pass prompts to generate()"
_OF_A_MODEL = (ModelFields, SourceConfig, TokenizerConfig)
_OF_ANY_MODEL = ("seed", "model_config")  # settings of a source that do not name or describe a model
_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")

_DESCRIBES = "describes a model, and attach_engine has one in memory; leave it out"


def known_names() -> dict[str, Flag]:
    """Return every name of a setting: `--inference-max-seq-length` is `inference_max_seq_length`.

    The field that a flag sets is a name, too, unless a flag has this name: `max_sequence_length`.
    """
    flags = [flag for group in (*GROUPS, SYNONYMS) for flag in group.flags]
    names = {key.replace("-", "_"): flag for flag in flags for key in flag.keys}
    return {flag.field: flag for flag in flags} | names


def is_of_the_engine(flag: Flag) -> bool:
    """Return whether a flag is for the engine; other flags control prompts and results of the tool."""
    return flag.config is not RunConfig or flag.field == _LOG_INTERVAL


def read_settings(given: Mapping[str, Setting]) -> InferenceSettings:
    """Return the settings of keyword arguments, which override a file named by `model_config`.

    Raises:
        ConfigError: A name is unknown or was removed, a value has the wrong type, or the command line would refuse it.
    """
    known = known_names()
    values: dict[str, object] = {}
    for name, value in given.items():
        refuse_removed(name, value if isinstance(value, str) else None, name)
        flag = _found(name, known)
        if flag.key in values:
            raise ConfigError(f"{name} {shown(value)} is given twice, as {flag.field} too; give one of them")
        values[flag.key] = _checked(name, value, flag)
    settings = settings_of({key: value for key, value in values.items() if value is not None})
    run = vars(settings.run).items()
    others = [name for name, value in run if name != _LOG_INTERVAL and value != getattr(RunConfig, name)]
    if others:
        raise ConfigError(f"{others[0]} in the file that model_config names {_RUN_ONLY}")
    return settings


def _found(name: str, known: Mapping[str, Flag]) -> Flag:
    if name not in known:
        engine_flags = [other for other, flag in known.items() if is_of_the_engine(flag)]
        meant = closest(name, engine_flags)
        hint = f"did you mean {meant}?" if meant else "megatron-ext run --help=all lists the names"
        raise ConfigError(f"{name} is not a setting of an engine; {hint}")
    if not is_of_the_engine(known[name]):
        raise ConfigError(f"{name} {_RUN_ONLY}")
    return known[name]


def _checked(name: str, value: Setting, flag: Flag) -> object:
    """Return the value converted to the type of the flag's field; None if not given."""
    kind, choices = flag.kind, flag.declared.choices
    if isinstance(value, os.PathLike) and kind.item is str:
        value = os.fspath(value)
    try:
        converted = kind.convert(value)
    except MismatchError as error:
        raise ConfigError(f"{name} {shown(value)} is not {error}") from None
    if choices and converted is not None and converted not in choices:
        raise ConfigError(f"{name} {shown(value)} is unknown; one of {', '.join(choices)}")
    return converted


def load_engine(**settings: Setting) -> LoadedEngine:
    """Load a model and build an engine; without settings, the embedded model.

    >>> with load_engine(num_tokens_to_generate=8, inference_dynamic_batching_block_size=16) as engine:
    ...     (record,) = engine.generate("The import statement")
    >>> len(record.generated_tokens)
    8

    With several ranks, the first one calls this, and all others call `follow_engine`, or `load_follower`, with the same
    settings.

    Args:
        settings: Engine flags of `megatron-ext run`, by name: `--load-hf DIR` is
            `load_hf=DIR`, `--inference-max-seq-length 4096` is `inference_max_seq_length=4096`, `--bf16` is
            `bf16=True`, `--no-enable-chunked-prefill` is `enable_chunked_prefill=False`. Sampling flags are the
            defaults of requests without `RequestParams`. These settings override a `model_config` file of flags.

    Raises:
        ConfigError: A setting is unknown, of the wrong type, or cannot work; the message has a remedy. Raised before
            anything is allocated.
        RankError: One of several ranks could not load its part.
    """
    with _prepared(settings) as read:
        from megatron_ext.api.engine import LoadedEngine
        from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS
        from megatron_ext.models.engine_args import EngineArgs
        from megatron_ext.models.generation_defaults import request_defaults

        defaults = request_defaults(read.source, read.sampling_given)
        with _joined_ranks(read, _Role.LEADS) as parallel_context:
            args = EngineArgs(read, parallel_context)
            writer = args.weight_writer()
            return LoadedEngine(args.build_engine(), writer, defaults, PROCESS_GROUPS.leave)


def follow_engine(**settings: Setting) -> None:
    """Take part in the steps of the engine that the first rank loads, until it is closed; called on all other ranks.

    Args:
        settings: The settings of the first rank.

    Raises:
        ConfigError: As `load_engine`; or this is the first rank, or the only one.
        RankError: A rank has failed or does not answer, the first one included.
    """
    with _prepared(settings) as read:
        from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS
        from megatron_ext.models.engine_args import follow

        with _joined_ranks(read, _Role.FOLLOWS) as parallel_context:
            assert parallel_context is not None, "a rank that is alone leads"
            follow(read, parallel_context, on_ready=lambda: None)
        PROCESS_GROUPS.leave()


def load_follower(**settings: Setting) -> EngineFollower:
    """Load this rank's part of the engine that the first rank loads; called on all other ranks of a training program.

    Unlike `follow_engine` this returns, before the first step, an object whose `follow()` takes part in the steps until
    the first rank suspends or closes the engine, or until all ranks update the weights from their shards.

    Args:
        settings: The settings of the first rank.

    Raises:
        ConfigError: As `follow_engine`.
        RankError: One of the ranks could not load its part.
    """
    with _prepared(settings) as read:
        from megatron_ext.api.engine import EngineFollower
        from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS
        from megatron_ext.models.engine_args import build_follower, load, weight_writer

        with _joined_ranks(read, _Role.RETURNS) as parallel_context:
            assert parallel_context is not None, "a rank that is alone leads"
            writer = weight_writer(read, parallel_context, load(read))
            worker = build_follower(read, parallel_context, writer)
            return EngineFollower(worker, writer, PROCESS_GROUPS.leave)


@contextlib.contextmanager
def _prepared(given: Mapping[str, Setting]) -> Iterator[InferenceSettings]:
    """Read settings, and hide megatron-core's warnings of missing optional packages from imports in the block."""
    settings = read_settings(given)
    check_address_space()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        yield settings


class _Role(enum.Enum):
    """Function that a rank has called."""

    LEADS = "load_engine"
    FOLLOWS = "follow_engine"
    RETURNS = "load_follower"


@contextlib.contextmanager
def _joined_ranks(settings: InferenceSettings, role: _Role) -> Iterator[ParallelContext | None]:
    """Join all ranks in process groups, left if the block fails; an error on one rank ends the others, too.

    Args:
        settings: Equal on all ranks.
    """
    import torch

    from megatron_ext.console.start import check_machine, say_start
    from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS, make_parallel_context
    from megatron_ext.parallel.failure import ending_together

    say_start(settings.start_notes)
    if not torch.distributed.is_initialized():  # otherwise the existing group defines the ranks
        check_machine(settings.parallel)
    PROCESS_GROUPS.enter(settings.parallel)
    try:
        with ending_together(settings.parallel.distributed_timeout_minutes):
            parallel_context = make_parallel_context(settings.parallel)
            if parallel_context is None:
                _check_role(0, role)
            else:
                roles = parallel_context.ask_all(partial(_check_role, parallel_context.here.rank, role))
                parallel_context.releases_ranks = _are_released(roles)
            yield parallel_context
    except BaseException:
        PROCESS_GROUPS.leave()
        raise


def _check_role(rank: int, role: _Role) -> _Role:
    if rank and role is _Role.LEADS:
        raise ConfigError(f"rank {rank} is not the first rank: call follow_engine, not load_engine")
    if not rank and role is not _Role.LEADS:
        raise ConfigError(f"this is the first or the only rank: call load_engine, not {role.value}")
    return role


def _are_released(roles: Sequence[_Role]) -> bool:
    """Return whether the other ranks return to their callers; all of them call the same function."""
    rank = next((rank for rank, role in enumerate(roles) if rank and role is not roles[1]), None)
    if rank is not None:
        raise ConfigError(f"rank 1 has called {roles[1].value}, and rank {rank} {roles[rank].value}; call one of them")
    return _Role.RETURNS in roles


def attach_engine(model: object, tokenizer: object = None, **settings: Setting) -> AttachedEngine | EngineFollower:
    """Build an engine around a model of megatron-core in memory, and share its parameters.

    Every rank of the caller's world calls this with its part of the model. The first one gets an engine with the
    methods of `LoadedEngine`. The others get an object whose `follow()` takes part in the steps until the first rank
    suspends or closes the engine.

    The model is left as it is. Edits of its parameters that raise torch's version counters are noticed before the next
    step; after other ones, such as writes to a flat buffer that parameters are views of, call `weights_changed()`. If
    that was forgotten, samples of the weights show it before the first request after an idle second
    (`SilentWeightChange`).

    Args:
        model: `GPTModel`, `MambaModel` or `HybridModel`, bare or in `Float16Module` and `DistributedDataParallel`, or
            the list of one such model; built in Megatron's process groups.
        tokenizer: Tokenizer of megatron-core or of this package; None for prompts of token ids.
        settings: Settings of `load_engine` that do not name or describe a model. The sizes of the existing process
            groups apply.

    Raises:
        ConfigError: A setting is unknown or describes a model; a part of the model cannot be run exactly, which the
            message names; another engine is attached to the model. Raised before anything is allocated, on all ranks.
        RankError: Another rank has failed or does not answer.
    """
    _refuse_names_of_models(settings)
    with _prepared(settings) as read:
        _refuse_model_settings(read)
        return _attach(model, tokenizer, read)


def _refuse_names_of_models(settings: Mapping[str, Setting]) -> None:
    """Raise for given settings that describe a model, whatever their values."""
    known = known_names()
    for name, value in settings.items():
        if value is None or name not in known:  # unknown ones are refused with a hint
            continue
        flag = known[name]
        if (flag.config in _OF_A_MODEL and flag.field not in _OF_ANY_MODEL) or flag.field in _STAGES:
            raise ConfigError(f"{name} {_DESCRIBES}")


def _refuse_model_settings(settings: InferenceSettings) -> None:
    """Raise for settings of a `model_config` file that describe a model."""
    plain = SourceConfig()
    found = [name for name in settings.model_overrides if settings.model_overrides[name] is not None]
    found += [
        name
        for name, value in vars(settings.source).items()
        if name not in _OF_ANY_MODEL and value != getattr(plain, name)
    ]
    found += [name for name in _STAGES if getattr(settings.parallel, name) is not None]
    if found:
        raise ConfigError(f"{found[0]} {_DESCRIBES}")


def _attach(model: object, tokenizer: object, settings: InferenceSettings) -> AttachedEngine | EngineFollower:
    from megatron_ext.api.engine import AttachedEngine, EngineFollower
    from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS, existing_sizes, make_parallel_context
    from megatron_ext.models.attach.modules import is_gpt, unwrapped
    from megatron_ext.models.engine_args import EngineArgs, build_follower
    from megatron_ext.models.generation_defaults import request_defaults
    from megatron_ext.models.update.writer import WeightWriter
    from megatron_ext.parallel.failure import ending_together

    defaults = request_defaults(settings.source, settings.sampling_given)
    settings = dataclasses.replace(settings, parallel=existing_sizes(settings.parallel))
    with contextlib.ExitStack() as undo:
        PROCESS_GROUPS.join(settings.parallel)
        undo.callback(PROCESS_GROUPS.leave)
        parallel_context = make_parallel_context(settings.parallel)
        if parallel_context is not None:
            parallel_context.releases_ranks = True
        loaded = _on_all_ranks(parallel_context, partial(_shared, model, tokenizer, settings.parallel, undo))
        in_gpt = is_gpt(unwrapped(model))
        weight_writer = WeightWriter(loaded, parallel_context, source_is_gpt=in_gpt, owns_padding=False)
        with ending_together(settings.parallel.distributed_timeout_minutes):
            if parallel_context is None or parallel_context.is_driver:
                engine = EngineArgs(settings, parallel_context, loaded=loaded).build_engine()
                return AttachedEngine(engine, weight_writer, defaults, undo.pop_all().close)
            worker = build_follower(settings, parallel_context, weight_writer)
            return EngineFollower(worker, weight_writer, undo.pop_all().close)


def _shared(model: object, tokenizer: object, parallel: ParallelConfig, undo: contextlib.ExitStack) -> LoadedModel:
    """Return a model of ours with the parameters of the caller's, which is marked until `undo` is closed."""
    from megatron_ext.models.attach.modules import unwrapped
    from megatron_ext.models.attach.shared_model import attached, share_model

    source = unwrapped(model)
    undo.enter_context(attached(source))
    return share_model(source, parallel, tokenizer)


def _on_all_ranks(parallel_context: ParallelContext | None, make: Callable[[], LoadedModel]) -> LoadedModel:
    """Return what `make` returns on this rank; a `ConfigError` of one rank is raised on all of them."""
    if parallel_context is None:
        return make()
    made: list[LoadedModel] = []
    parallel_context.ask_all(lambda: made.append(make()))
    return made[0]
