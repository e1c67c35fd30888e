"""Agreement of the ranks that keep one cache, each its own part of every entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class LostRanksError(Exception):
    """Another rank has failed, or does not answer. The message is one line."""


class Agreement:
    """Ranks that keep one cache; each makes the same calls in the same order. This base class serves a single rank.

    Attributes:
        leads: Whether this rank decides for all where one has to.
    """

    leads = True

    def from_leader(self, value: T | None) -> T:
        """Return the value that the leader has given, also on a rank that only plans; other values are ignored.

        Raises:
            LostRanksError: A rank has failed, or does not answer; also the next three.
        """
        assert value is not None, "the leader gives one"
        return value

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Return the least number for each place, also on a rank that only plans; each gives equally many."""
        return list(numbers)

    def report(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        """Give numbers without waiting; the function returns the least ones, and None until all ranks have given."""
        return lambda: list(numbers)

    def least_written(self, number: int, seconds: float) -> int:
        """Return the least number of the ranks that have a part of the entries.

        Args:
            number: Number of this rank.
            seconds: Time to wait for the others.
        """
        return number
