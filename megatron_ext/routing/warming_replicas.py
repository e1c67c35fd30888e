"""Share of replicas whose caches have yet to grow.

A replica that joins a fleet in use holds nothing. A rule that starts conversations where the least is held would start
all of them there, each with a whole prompt to compute. So a warming replica gets no more than its share of the prompt
tokens of all, until it holds half as much as the replicas hold on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Given:
    """Prompt tokens to compute that were given since a warming replica joined: to itself, and to all replicas."""

    own: int = 0
    all: int = 0


class WarmingReplicas:
    """Warming replicas of a fleet, by the numbers of their bits.

    Attributes:
        sated: Bits of the warming replicas that have had their share.
    """

    def __init__(self) -> None:
        self._given: dict[int, _Given] = {}
        self.sated = 0

    def join(self, number: int) -> None:
        """Add a replica that holds nothing to a fleet that holds something."""
        self._given[number] = _Given()

    def leave(self, number: int) -> None:
        """Remove a replica that has left or grown; one that is no warming replica is ignored."""
        self._given.pop(number, None)
        self.sated &= ~(1 << number)

    def give(self, number: int, tokens: int, replicas: int, held: Callable[[int], int], total: int) -> None:
        """Note that a request was sent.

        Args:
            number: Number of its replica.
            tokens: Prompt tokens that are computed there.
            replicas: Number of all replicas.
            held: Function from a replica's number to the tokens that it holds.
            total: Tokens that all replicas hold.
        """
        for one, given in list(self._given.items()):
            if 2 * held(one) * replicas >= total:
                self.leave(one)
                continue
            given.all += tokens
            given.own += tokens if one == number else 0
            is_sated = given.own * replicas > given.all
            self.sated = self.sated | 1 << one if is_sated else self.sated & ~(1 << one)
