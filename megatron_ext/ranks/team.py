"""The ranks of a world as they work together: who holds what, who hears whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megatron_ext.errors import ConfigError
from megatron_ext.ranks.link import Link
from megatron_ext.ranks.results import Results

T = TypeVar("T")

_HEARTBEAT = 10.0  # seconds


@dataclass(frozen=True)
class Place:
    """What one rank is.

    Attributes:
        rank: Of the world.
        tensor: Its part of each layer.
        pipeline: Its stage.
        replica: Its copy of the model.
        samples: Whether results come from it: the first part of the last stage.
    """

    rank: int
    tensor: int
    pipeline: int
    replica: int
    samples: bool

    def __str__(self) -> str:
        return f"rank {self.rank} (replica {self.replica}, stage {self.pipeline}, part {self.tensor})"


class Team:
    """All ranks, seen from one of them. Made by all at once, since groups of ranks are.

    Args:
        here: This rank's place.
        minutes: That a rank waits for another one.
    """

    def __init__(self, here: Place, minutes: float) -> None:
        self.here = here
        self.minutes = minutes
        timeout = timedelta(minutes=minutes)
        self._everybody = dist.new_group(backend="gloo", timeout=timeout)
        self.places = tuple(self._gather(here))
        self.link = Link(self._everybody)
        self._results: dict[int, Results] = {}  # of the replicas that concern this rank
        for replica in range(self.replicas):
            ranks = sorted({0, *(place.rank for place in self.places if place.replica == replica)})
            group = dist.new_group(ranks, backend="gloo", timeout=timeout)
            if here.rank in ranks:
                (source,) = (one.rank for one in self.places if one.replica == replica and one.samples)
                self._results[replica] = Results(group, here.rank, source)

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return 1 + max(place.replica for place in self.places)

    @property
    def heartbeat(self) -> float:
        """Seconds of silence after which rank 0 says that it lives: well before anybody gives it up."""
        return min(_HEARTBEAT, self.minutes * 60 / 4)

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.here.rank == 0

    def results(self, replica: int) -> Results:
        """Of a replica that this rank is part of; of any, on rank 0."""
        return self._results[replica]

    def ask_all(self, question: Callable[[], T]) -> Sequence[T]:
        """What each rank answers, in order of rank.

        Raises:
            ConfigError: One of them raised it: the same error on all of them.
        """
        answer: T | ConfigError
        try:
            answer = question()
        except ConfigError as error:
            answer = error
        answers = self._gather(answer)
        mistakes = [(rank, one) for rank, one in enumerate(answers) if isinstance(one, ConfigError)]
        if mistakes:
            rank, mistake = mistakes[0]
            all_alike = len({str(one) for _, one in mistakes}) == 1 and len(mistakes) == len(answers)
            raise ConfigError(str(mistake) if all_alike else f"rank {rank}: {mistake}")
        return [one for one in answers if not isinstance(one, ConfigError)]

    def _gather(self, one: T) -> list[T]:
        found: list[T | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, one, group=self._everybody)
        return found  # type: ignore[return-value]  # every rank has given one
