"""Parallel context: the ranks of a world, their parts of the model, and their process groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron_ext.config import ParallelConfig
from megatron_ext.engine.executor import Executor
from megatron_ext.parallel.cache_ranks import CacheRanks
from megatron_ext.parallel.collectives import done_by_all
from megatron_ext.parallel.commands import Link
from megatron_ext.parallel.rank_drafters import LeadingDrafter, RankDrafter
from megatron_ext.parallel.shared_results import SharedExecutor
from megatron_ext.speculation.drafter import Drafter

T = TypeVar("T")

_HEARTBEAT = 10.0  # seconds


@dataclass(frozen=True)
class RankInfo:
    """Position of one rank in the layout.

    Attributes:
        rank: Rank in the world.
        tensor: Tensor-parallel rank, its part of each layer.
        pipeline: Pipeline stage.
        replica: Copy of the model.
        samples: Whether results come from this rank: the first part of the last stage.
    """

    rank: int
    tensor: int
    pipeline: int
    replica: int
    samples: bool


class ParallelContext:
    """Parallel context of one rank. All ranks construct it together, since it creates process groups.

    Args:
        here: Rank info of this rank.
        parallel: Timeout of the ranks, and whether they are checked.

    Attributes:
        records_routing: Whether results have routing indices; set before executors are made.
        releases_ranks: Whether a suspension releases the other ranks to their callers; set before the engine is built.
    """

    def __init__(self, here: RankInfo, parallel: ParallelConfig) -> None:
        self.here = here
        self._minutes = parallel.distributed_timeout_minutes
        self._checks = parallel.check_ranks
        self.records_routing = False
        self.releases_ranks = False
        timeout = timedelta(minutes=self._minutes)
        self._all_ranks = dist.new_group(backend="gloo", timeout=timeout)
        self.places = tuple(self.gather(here))
        self.link = Link(self._all_ranks)
        self._groups: dict[int, dist.ProcessGroup] = {}  # groups of the replicas that concern this rank, with rank 0
        self._disk_groups: list[dist.ProcessGroup | None] = []  # of the replicas, once they are used
        for replica in range(self.replicas):
            group = self._group({0, *self.ranks_of(replica)})
            if group is not None:
                self._groups[replica] = group

    @property
    def replicas(self) -> int:
        """Number of copies of the model."""
        return 1 + max(place.replica for place in self.places)

    @property
    def heartbeat(self) -> float:
        """Maximum seconds between two messages of rank 0: well before the other ranks time out."""
        return min(_HEARTBEAT, self._minutes * 60 / 4)

    @property
    def is_driver(self) -> bool:
        """True on rank 0."""
        return self.here.rank == 0

    def executor(self, replica: int, own: Executor) -> Executor:
        """Return the executor of a replica, of which `own` computes this rank's part if it is this rank's replica."""
        part, ranks = own if replica == self.here.replica else None, (self.here.rank, self._source(replica))
        routing = self.records_routing
        return SharedExecutor(part, self._groups[replica], *ranks, has_routing=routing, checks=self._checks)

    def drafter(self, replica: int, layer: Drafter | None) -> RankDrafter:
        """Return the drafter for the commands of a replica that concerns this rank.

        Args:
            replica: Number of the replica.
            layer: See `RankDrafter`.
        """
        return RankDrafter(self._groups[replica], self.here.rank, self._source(replica), layer)

    def leading_drafter(self, layer: Drafter | None) -> LeadingDrafter:
        """Return rank 0's drafter, whose drafts the ranks of each replica compute.

        Args:
            layer: Drafter of this rank's part of the model; None without one.
        """
        own = self.here.replica
        drafters = [self.drafter(number, layer if number == own else None) for number in range(self.replicas)]
        return LeadingDrafter(drafters, layer)

    def _source(self, replica: int) -> int:
        (source,) = (one.rank for one in self.places if one.replica == replica and one.samples)
        return source

    def cache_ranks(self, replica: int) -> CacheRanks:
        """Return the ranks that keep the cache of a replica, on each of them and on rank 0.

        All ranks make the first call together, since it creates process groups.
        """
        every = [self.ranks_of(number) for number in range(self.replicas)]
        if not self._disk_groups:  # apart from the groups of steps, since reports come at any time
            self._disk_groups = [self._group({0, *ranks}) for ranks in every]
        group = self._disk_groups[replica]
        assert group is not None, "this rank keeps a part of the cache, or plans for it"
        return CacheRanks(group, every[replica], self.here.rank)

    def _group(self, ranks: set[int]) -> dist.ProcessGroup | None:
        """Make a process group beside all other ranks; None where this rank does not belong to it."""
        group = dist.new_group(sorted(ranks), backend="gloo", timeout=timedelta(minutes=self._minutes))
        return group if self.here.rank in ranks else None

    def ranks_of(self, replica: int) -> list[int]:
        """Return the ranks of a replica."""
        return [place.rank for place in self.places if place.replica == replica]

    def ask_all(self, question: Callable[[], T]) -> Sequence[T]:
        """Return each rank's answer, in order of rank; see `done_by_all` for errors."""
        return done_by_all(question, self.gather)

    def broadcast(self, tensor: Tensor) -> None:
        """Fill a tensor in host memory on all ranks with the first rank's values; shape and type are equal on all."""
        dist.broadcast(tensor, 0, group=self._all_ranks)

    def gather(self, one: T) -> list[T]:
        """Return what each rank has given, in order of rank."""
        found: list[T | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, one, group=self._all_ranks)
        return found  # type: ignore[return-value]  # every rank has given one
