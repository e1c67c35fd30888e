"""Engine loading from keyword arguments. Heavy modules are imported after the settings have been checked."""

from __future__ import annotations

import contextlib
import enum
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron_ext.api.settings import Setting, read_settings
from megatron_ext.config import InferenceSettings
from megatron_ext.errors import ConfigError
from megatron_ext.memory.host_limits import check_address_space

if TYPE_CHECKING:
    from megatron_ext.api.attached import EngineFollower
    from megatron_ext.api.engine import LoadedEngine
    from megatron_ext.parallel.parallel_context import ParallelContext


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
    read = read_settings(settings)
    check_address_space()
    with quiet_imports():
        return _load(read)


def follow_engine(**settings: Setting) -> None:
    """Take part in the steps of the engine that the first rank loads, until it is closed; called on all other ranks.

    Args:
        settings: The settings of the first rank.

    Raises:
        ConfigError: As `load_engine`; or this is the first rank, or the only one.
        RankError: A rank has failed or does not answer, the first one included.
    """
    read = read_settings(settings)
    check_address_space()
    with quiet_imports():
        _follow(read)


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
    read = read_settings(settings)
    check_address_space()
    with quiet_imports():
        return _load_follower(read)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Hide megatron-core's warnings of missing optional packages."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        yield


def _load(settings: InferenceSettings) -> LoadedEngine:
    from megatron_ext.api.engine import LoadedEngine
    from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS
    from megatron_ext.models.engine_args import EngineArgs
    from megatron_ext.models.generation_defaults import request_defaults

    defaults = request_defaults(settings.source, settings.sampling_given)
    with contextlib.ExitStack() as stack:
        parallel_context = stack.enter_context(_joined_ranks(settings, _Role.LEADS))
        args = EngineArgs(settings, parallel_context)
        writer = args.weight_writer()
        return LoadedEngine(args.build_engine(), writer, defaults, PROCESS_GROUPS.leave)


def _follow(settings: InferenceSettings) -> None:
    from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS
    from megatron_ext.models.engine_args import follow

    with _joined_ranks(settings, _Role.FOLLOWS) as parallel_context:
        assert parallel_context is not None, "a rank that is alone leads"
        follow(settings, parallel_context, on_ready=lambda: None)
    PROCESS_GROUPS.leave()


def _load_follower(settings: InferenceSettings) -> EngineFollower:
    from megatron_ext.api.attached import EngineFollower
    from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS
    from megatron_ext.models.engine_args import build_follower, load, weight_writer

    with _joined_ranks(settings, _Role.RETURNS) as parallel_context:
        assert parallel_context is not None, "a rank that is alone leads"
        writer = weight_writer(settings, parallel_context, load(settings))
        worker = build_follower(settings, parallel_context, writer, settings.cache)
        return EngineFollower(worker, writer, PROCESS_GROUPS.leave)


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
        role: Role of this rank.
    """
    from megatron_ext.console.start import check_machine, say_start
    from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS, is_initialized, make_parallel_context
    from megatron_ext.parallel.failure import ending_together

    say_start(settings.start)
    if not is_initialized():  # otherwise the existing group defines the ranks
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
