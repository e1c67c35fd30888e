"""Outcome of the writes of all ranks: the same error on each if one has failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ext.errors import WeightUpdateError


def require_success(
    failures: Sequence[str | None], put_back: Callable[[], None] | None, error: Exception | None
) -> None:
    """Raise if a rank has failed to write, after the old weights were put back if they were kept.

    Args:
        failures: Message of each rank; None for success.
        put_back: Writes this rank's old weights back; None if no rank has kept them.
        error: This rank's own failure.

    Raises:
        WeightUpdateError: A rank has failed; named if there are several.
    """
    failed = [(rank, one) for rank, one in enumerate(failures) if one is not None]
    if not failed:
        return
    if put_back is not None:
        put_back()
    rank, message = failed[0]
    told = message if len(failures) == 1 else f"rank {rank}: {message}"
    raise WeightUpdateError(told, is_restored=put_back is not None) from error
