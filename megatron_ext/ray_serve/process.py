"""Start of a process under Ray Serve that computes: of a replica, or of a further rank of one. Needs no Ray."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.config import ServerSettings
    from megatron_ext.parallel.parallel_context import ParallelContext


def prepare_process(words: Sequence[str]) -> ServerSettings:
    """Apply the settings that hold for a whole process; call it before torch is imported.

    Args:
        words: Command line of `megatron-ext serve`.

    Raises:
        ConfigError: The settings are wrong, or do not fit the ranks of the environment.
    """
    from arguments import parse_server_arguments
    from megatron_ext.console.start import check_machine, limit_spinning, say_start
    from megatron_ext.memory.host_limits import check_address_space
    from megatron_ext.server.log import set_up_logging

    settings = parse_server_arguments(words)
    set_up_logging(settings.server.log_level)
    os.environ.update(settings.start.environment)
    limit_spinning()
    check_address_space()
    say_start(settings.start)
    check_machine(settings.parallel)
    return settings


@contextlib.contextmanager
def joined_world(settings: ServerSettings) -> Iterator[ParallelContext | None]:
    """Join the ranks of the environment; an error in the block ends all of them, see `ending_together`.

    Yields:
        All ranks; None for a world of one.

    Raises:
        RankError: A rank has failed, or does not answer.
    """
    from megatron_ext.mcore import platform
    from megatron_ext.mcore.parallel_state.process_groups import make_parallel_context
    from megatron_ext.parallel.failure import ending_together

    with ending_together(settings.parallel.distributed_timeout_minutes):
        platform.initialize(settings.parallel)
        yield make_parallel_context(settings.parallel)


def run_rank(settings: ServerSettings) -> None:
    """Take part in the steps of the replica whose further rank this process is, until the replica stops.

    Args:
        settings: Settings of the replica.

    Raises:
        RankError: A rank has failed, or does not answer, the first one included.
    """
    from megatron_ext.mcore import platform
    from megatron_ext.models.engine_args import follow

    try:
        with joined_world(settings) as parallel_context:
            assert parallel_context is not None, "a replica of one rank has no further ones"
            follow(settings, parallel_context, on_ready=lambda: None)
    finally:
        platform.shut_down()
