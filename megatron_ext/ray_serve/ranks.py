"""Start of processes that compute, and the further ranks of a replica.

Ranks are actors in the replica's placement group, which start and end with it.

Ray reserves the group before the replica starts, and removes it, with all actors in it, when the replica has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_ext.console.start import limit_spinning
from megatron_ext.parallel.world import environments_of_ranks

if TYPE_CHECKING:
    from megatron_ext.config import ServerSettings
    from megatron_ext.parallel.parallel_context import ParallelContext

logger = logging.getLogger(__name__)
_LAST_WORDS = 5.0  # seconds for a rank to report the error that has ended another one


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
    limit_spinning()
    check_address_space()
    say_start(settings.start_notes)
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


class RankActor:
    """Rank other than the first."""

    def node(self) -> str:
        """Import torch, as the first rank does meanwhile, and return the id of this actor's node."""
        limit_spinning()
        import torch  # noqa: F401

        return _node()

    def prepare(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Prepare this process; its errors come before any rank waits for another one."""
        os.environ.update(environment)
        self._settings = prepare_process(words)

    def run(self) -> None:
        """Compute with the other ranks until the replica stops; see `run_rank`."""
        run_rank(self._settings)

    def ping(self) -> None:
        """Answer as a sign of life, beside `run`."""


class Ranks:
    """Actors of all ranks but the first; this process becomes the first rank.

    Args:
        words: Command line of `megatron-ext serve`.
        size: Number of ranks, at least 2.

    Raises:
        ConfigError: The settings do not fit the machine of a rank.
    """

    def __init__(self, words: Sequence[str], size: int) -> None:
        group = get_current_placement_group()
        assert group is not None, "Ray reserves a bundle for each rank"
        assert group.bundle_count == size, (group.bundle_count, size)
        self._actors = [
            ray.remote(RankActor)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=2,  # `run`, and `ping` beside it
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            .remote()
            for index, bundle in enumerate(group.bundle_specs)
            if index
        ]
        nodes = [actor.node.remote() for actor in self._actors]
        limit_spinning()
        from torch.distributed import TCPStore

        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)  # lives as long as this process
        first, *others = environments_of_ranks([_node(), *ray.get(nodes)], address, self._store.port)
        os.environ.update(first)
        given = zip(self._actors, others, strict=True)
        ray.get([actor.prepare.remote(list(words), variables) for actor, variables in given])
        self._runs = [actor.run.remote() for actor in self._actors]
        self._pings = [actor.ping.remote() for actor in self._actors]

    def watch(self, on_end: Callable[[str], object]) -> None:
        """Call a function, in any thread, with a sentence about each rank that has ended."""

        def ended(rank: int, run: Future[None]) -> None:
            error = run.exception()
            on_end(f"rank {rank} has ended" + (f": {_text(error)}" if error else ""))

        for rank, run in enumerate(self._runs, 1):
            run.future().add_done_callback(lambda future, rank=rank: ended(rank, future))

    def alive(self) -> dict[str, bool]:
        """Return for each rank, by its name, whether it has answered since the last call that returned True for it."""
        answered = []
        for index, actor in enumerate(self._actors):
            ready, _ = ray.wait([self._pings[index]], timeout=0)
            answered.append(bool(ready))
            if ready:
                self._pings[index] = actor.ping.remote()
        return {f"rank {rank}": has_answered for rank, has_answered in enumerate(answered, 1)}

    def error(self) -> str:
        """Return what the ranks that have failed report; empty if none has."""
        done, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=_LAST_WORDS)
        texts = []
        for run in done:
            try:
                ray.get(run)
            except Exception as error:  # of whichever kind; it is reported
                texts.append(_text(error))
        return "; ".join(text for text in texts if text)


def _node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def _text(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    return " ".join(str(cause).split())
