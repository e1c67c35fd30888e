"""Agreement of the ranks that keep one cache, each its own part of every entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class LostRanksError(Exception):
    """Another rank has failed, or does not answer. The message is one line."""


class Agreement(Protocol):
    """Ranks that keep one cache; each of them makes the same calls in the same order.

    Attributes:
        leads: Whether this rank decides for all where one has to.
    """

    leads: bool

    def from_leader(self, value: T | None) -> T:
        """Return the value that the leader has given; those of other ranks are ignored.

        Raises:
            LostRanksError: A rank has failed, or does not answer; also the next one.
        """

    def least(self, numbers: Sequence[int], seconds: float | None = None) -> list[int]:
        """Return the least of the numbers that the ranks have given for each place.

        Args:
            numbers: Equally many on each rank.
            seconds: Time to wait for the others; by default as long as anywhere.
        """


class Alone:
    """Agreement of a single rank."""

    leads = True

    def from_leader(self, value: T | None) -> T:
        """Return the value; see `Agreement`."""
        assert value is not None, "the leader gives one"
        return value

    def least(self, numbers: Sequence[int], seconds: float | None = None) -> list[int]:
        """Return the numbers; see `Agreement`."""
        return list(numbers)
