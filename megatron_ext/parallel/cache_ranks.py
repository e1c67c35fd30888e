"""Ranks that keep the cache of one replica on disk, each its part: their agreement, and their slots in a directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.disk.restore import Agreement
from megatron_ext.prefix_cache.disk.slot import (
    DiskUnavailableError,
    SlotDirectory,
    SlotHeldError,
    take_slot,
    take_slot_of_rank,
)
from megatron_ext.prefix_cache.disk.store import DiskStore, open_store

T = TypeVar("T")


class CacheRanks(Agreement):
    """Ranks of a replica, each with a part of its cache's entries, and rank 0, which plans for it.

    Args:
        group: Group of the replica's ranks and rank 0.
        ranks: Ranks of the replica, the leader first.
        rank: This rank.

    Attributes:
        leads: Whether this rank is the first of the replica.
        position: Position of this rank in the replica; None for rank 0 if it belongs to another one.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int) -> None:
        self._group, self._leader = group, ranks[0]
        self.leads = rank == self._leader
        self.position = ranks.index(rank) if rank in ranks else None

    def from_leader(self, value: T | None) -> T:
        """Return the leader's value, which can be pickled; see `Agreement`."""
        found = [value]
        dist.broadcast_object_list(found, self._leader, group=self._group)
        return found[0]  # type: ignore[return-value]  # the leader gives one

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Return the least numbers of all ranks; see `Agreement`."""
        row = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(row, dist.ReduceOp.MIN, group=self._group)
        return [int(one) for one in row.tolist()]

    def report(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        """Give numbers without waiting; see `Agreement`."""
        row = torch.tensor(numbers, dtype=torch.int64)
        work = dist.all_reduce(row, dist.ReduceOp.MIN, group=self._group, async_op=True)
        assert work is not None, "the call is asynchronous"

        def found() -> list[int] | None:
            if not work.is_completed():
                return None
            work.wait()
            return [int(one) for one in row.tolist()]

        return found


def open_beside_others(
    directory: Path,
    identity: bytes,
    limit_bytes: int,
    replica: int,
    position: int,
    gather: Callable[[object], Sequence[object]],
) -> DiskStore:
    """Take this rank's slot of a directory and open the store in it, beside all other ranks of the world.

    Args:
        directory: See `take_slots`, also `replica`, `position` and `gather`.
        identity: See `DiskStore`, also the next one.
        limit_bytes: Budget of this rank's files.

    Raises:
        ConfigError: See `take_slots`, also the next one.
        DiskUnavailableError: A rank's directory cannot be used now.
    """
    slot = take_slots(directory, replica, position, gather)
    store, error = _attempt(lambda: open_store(slot, identity, limit_bytes))
    if store is None:
        slot.close()
    _raise_first(gather(error), store)
    assert store is not None, "there was no error"
    return store


def take_slots(
    directory: Path, replica: int, position: int, gather: Callable[[object], Sequence[object]]
) -> SlotDirectory:
    """Take this rank's slot of a directory, beside all other ranks of the world: the same number within a replica.

    A replica's first rank takes the first number that is free; its other ranks take their slots of that number, on
    their machines. If one of those is held, the replica goes on to the next number.

    Args:
        directory: The directory, created if missing.
        replica: Replica of this rank.
        position: Place of this rank among its replica's ranks.
        gather: Returns what each rank of the world has given.

    Raises:
        ConfigError: A rank cannot use its directory; see `take_slot`. Raised on all ranks, also the next one.
        DiskUnavailableError: A rank's directory cannot be used now.
    """
    number = replica  # so that replicas find their own slots again
    while True:
        slot, error = _attempt(partial(take_slot, directory, number)) if position == 0 else (None, None)
        answers = gather(error if slot is None else (replica, slot.number))
        _raise_first(answers, slot)
        numbers: dict[int, int] = dict(one for one in answers if isinstance(one, tuple))
        if position:
            slot, error = _attempt(partial(take_slot_of_rank, directory, numbers[replica], position))
        answers = gather(error)
        _raise_first([None if isinstance(one, SlotHeldError) else one for one in answers], slot)
        if not any(isinstance(one, SlotHeldError) for one in answers):
            assert slot is not None, "all ranks have theirs"
            return slot
        if slot is not None:
            slot.close()
        number = numbers[replica] + 1


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of `make`, or the error of the directory that it raised."""
    try:
        return make(), None
    except (ConfigError, DiskUnavailableError) as error:
        return None, error


def _raise_first(answers: Sequence[object], own: SlotDirectory | DiskStore | None) -> None:
    """Raise the error of the first rank that has answered with one, after this rank's own part is closed."""
    for rank, error in enumerate(answers):
        if isinstance(error, (ConfigError, DiskUnavailableError)):
            if own is not None:
                own.close()
            kind = ConfigError if isinstance(error, ConfigError) else DiskUnavailableError
            raise kind(f"rank {rank}: {error}")
