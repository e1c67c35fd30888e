"""Collective decisions and work with errors shared by all ranks. Each rank makes these calls, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from megatron_ext.errors import ConfigError

T = TypeVar("T")


def decided_by_first(decide: Callable[[], T]) -> T:
    """Return the result of the first rank's call on every rank; the other ranks do not make the call.

    Args:
        decide: Returns a picklable value.

    Raises:
        ConfigError: The first rank's call raised it; it is raised on every rank.
    """
    if _world_size() == 1:
        return decide()
    answer: list[T | ConfigError | None] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            answer[0] = decide()
        except ConfigError as error:
            answer[0] = error
    torch.distributed.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], ConfigError):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]  # None can be the decision


def done_by_all(
    work: Callable[[], T], gather: Callable[[T | ConfigError], Sequence[T | ConfigError]] | None = None
) -> list[T]:
    """Do each rank's part, and return the results in order of rank; raise an error of any rank on all.

    Args:
        work: If ranks synchronize in it, all of them must fail if one does.
        gather: Returns what each rank has given, in order of rank; None for `gathered`.

    Raises:
        ConfigError: A rank's part failed; every rank raises the error of the first such rank, which it names unless all
            ranks failed alike.
    """
    own: T | ConfigError
    try:
        own = work()
    except ConfigError as error:
        own = error
    results = (gather or gathered)(own)
    mistakes = [(rank, one) for rank, one in enumerate(results) if isinstance(one, ConfigError)]
    if mistakes:
        rank, mistake = mistakes[0]
        all_alike = len({str(one) for _, one in mistakes}) == 1 and len(mistakes) == len(results)
        raise mistake if all_alike else type(mistake)(f"rank {rank}: {mistake}")
    return [one for one in results if not isinstance(one, ConfigError)]


def gathered(value: T) -> list[T]:
    """Return what each rank has given, in order of rank."""
    found = [value] * _world_size()
    if len(found) > 1:
        torch.distributed.all_gather_object(found, value)
    return found


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
