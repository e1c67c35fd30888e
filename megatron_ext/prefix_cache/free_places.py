"""Free places of a pool, of blocks or of snapshot slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

Place = TypeVar("Place", bound=int)


class FreePlaces(Protocol[Place]):
    """Free places, which a pool takes and gives back."""

    def __len__(self) -> int:
        """Return the number of places that `take` can hand out."""

    def __iter__(self) -> Iterator[Place]: ...

    def take(self, count: int) -> list[Place]:
        """Remove and return `count` free places."""

    def give(self, places: Sequence[Place]) -> None:
        """Add places, which are free now."""


class Stack(Generic[Place]):
    """Free places of a pool of fixed size: the last one given is taken first.

    Args:
        places: Places that are free at first, in the order in which they are taken.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._free = list(places)[::-1]

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._free)

    def take(self, count: int) -> list[Place]:
        """Remove and return the places that were given last, the very last first."""
        first = len(self._free) - count
        taken = self._free[first:][::-1]
        del self._free[first:]
        return taken

    def give(self, places: Sequence[Place]) -> None:
        """Add places, which are free now."""
        self._free += places
