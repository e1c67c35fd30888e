"""From keyword arguments to an engine. Everything heavy is imported once the settings are known to make sense."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from megatron_ext.api.settings import Setting, read_settings
from megatron_ext.config import InferenceSettings
from megatron_ext.errors import ConfigError
from megatron_ext.memory.host_limits import check_address_space

if TYPE_CHECKING:
    from megatron_ext.api.engine import LoadedEngine
    from megatron_ext.parallel.parallel_context import ParallelContext


def load_engine(**settings: Setting) -> LoadedEngine:
    """Load a model and build an engine around it; without any setting the embedded model.

    >>> with load_engine(num_tokens_to_generate=8, inference_dynamic_batching_block_size=16) as engine:
    ...     (record,) = engine.generate("The import statement")
    >>> len(record.generated_tokens)
    8

    Of several ranks the first one calls this, and all others call `follow_engine` with the same settings.

    Args:
        settings: The flags of `tools/run_inference.py` that are about the engine, by name: `--load-hf DIR` is
            `load_hf=DIR`, `--inference-max-seq-length 4096` is `inference_max_seq_length=4096`, `--bf16` is
            `bf16=True`, `--no-enable-chunked-prefill` is `enable_chunked_prefill=False`. Sampling flags are what
            requests ask for that bring no `RequestParams`. A `model_config` file of flags stands below them.

    Raises:
        ConfigError: A setting that is unknown, of another type, or cannot work, with what would; before anything is
            allocated.
        RankError: Of several ranks one could not load its part.
    """
    read = read_settings(settings)
    check_address_space()
    with _quiet_imports():
        return _load(read)


def follow_engine(**settings: Setting) -> None:
    """What a rank other than the first calls where that calls `load_engine`: it takes part until the engine is closed.

    Args:
        settings: The same as the first rank's.

    Raises:
        ConfigError: As `load_engine`; this is the first rank, or the only one.
        RankError: A rank has failed or does not answer, the first one included.
    """
    read = read_settings(settings)
    check_address_space()
    with _quiet_imports():
        _follow(read)


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")  # it warns of each optional package that is missing
        yield


def _load(settings: InferenceSettings) -> LoadedEngine:
    from megatron_ext.api.engine import LoadedEngine
    from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS
    from megatron_ext.models.engine_args import EngineArgs
    from megatron_ext.models.generation_defaults import request_defaults
    from megatron_ext.models.update.naming import naming_of

    defaults = request_defaults(settings.source, settings.sampling_given)
    with contextlib.ExitStack() as stack:
        parallel_context = stack.enter_context(_together(settings, leads=True))
        args = EngineArgs(settings, parallel_context)
        naming = None if parallel_context is not None else naming_of(settings.source, args.loaded.config)
        return LoadedEngine(args.build_engine(), args.loaded, naming, defaults, PROCESS_GROUPS.leave)


def _follow(settings: InferenceSettings) -> None:
    from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS
    from megatron_ext.models.engine_args import follow

    with _together(settings, leads=False) as parallel_context:
        assert parallel_context is not None, "a rank that is alone leads"
        follow(settings, parallel_context, on_ready=lambda: None)
    PROCESS_GROUPS.leave()


@contextlib.contextmanager
def _together(settings: InferenceSettings, *, leads: bool) -> Iterator[ParallelContext | None]:
    """All ranks, in groups that are left if the block fails; what raises in it on one rank ends the others, too.

    Args:
        settings: The same on each.
        leads: Whether this one is to be the first.
    """
    from megatron_ext.console.start import check_machine, say_start
    from megatron_ext.mcore.parallel_state.process_groups import PROCESS_GROUPS, is_there
    from megatron_ext.mcore.parallel_state.rank_info import make_parallel_context
    from megatron_ext.parallel.failure import ending_together

    say_start(settings.start)
    if not is_there():  # otherwise that says which ranks there are
        check_machine(settings.parallel)
    PROCESS_GROUPS.enter(settings.parallel)
    try:
        with ending_together(settings.parallel.distributed_timeout_minutes):
            parallel_context = make_parallel_context(settings.parallel)
            if parallel_context is None:
                _check_role(0, leads)
            else:
                parallel_context.ask_all(partial(_check_role, parallel_context.here.rank, leads))
            yield parallel_context
    except BaseException:
        PROCESS_GROUPS.leave()
        raise


def _check_role(rank: int, leads: bool) -> None:
    if rank and leads:
        raise ConfigError(f"rank {rank} is not the first one: it calls follow_engine, not load_engine")
    if not rank and not leads:
        raise ConfigError("the first rank, and one that is alone, calls load_engine, not follow_engine")
