"""Collective decisions and work with errors shared by all ranks. Each rank makes these calls, in the same order."""

from __future__ import annotations

from collections.abc import Callable
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


def done_by_all(work: Callable[[], None]) -> None:
    """Do each rank's part, and raise an error of any rank on all.

    Args:
        work: If ranks synchronize in it, all of them must fail if one does.

    Raises:
        ConfigError: A rank's part failed; every rank raises the error of the first such rank.
    """
    own: ConfigError | None = None
    try:
        work()
    except ConfigError as error:
        own = error
    failed = next((error for error in gathered(own) if error is not None), None)
    if failed is not None:
        raise failed


def gathered(value: T) -> list[T]:
    """Return what each rank has given, in order of rank."""
    found = [value] * _world_size()
    if len(found) > 1:
        torch.distributed.all_gather_object(found, value)
    return found


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
