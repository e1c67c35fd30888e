"""Random number generator of one request."""

from __future__ import annotations

import random


class RequestRng:
    """Uniform numbers for sampling the tokens of one request, one per token, from a generator of its own.

    Args:
        seed: Seed; the numbers depend on nothing else.
    """

    def __init__(self, seed: int | str) -> None:
        self._generator = random.Random(seed)
        self._next: list[float] = []  # of future tokens, in order

    def current(self, ahead: int = 0) -> float:
        """Return a number in [0, 1) for the next token; the same again if the step that samples it is repeated.

        Args:
            ahead: Offset from the next token; the token there keeps the number when its turn comes.
        """
        while len(self._next) <= ahead:
            self._next.append(self._generator.random())
        return self._next[ahead]

    def skip(self, count: int) -> None:
        """Skip the numbers of tokens that were generated before the generator was made."""
        for _ in range(count):
            self._generator.random()

    def advance(self, count: int = 1) -> None:
        """Go on to the number of the next token, after `count` generated ones."""
        if self._next:
            del self._next[:count]
