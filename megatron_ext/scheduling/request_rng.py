"""Random numbers of one request."""

from __future__ import annotations

import random


class RequestRng:
    """Uniform numbers for a request's tokens, one a token, from a generator of its own.

    Args:
        seed: All that they depend on.
    """

    def __init__(self, seed: int | str) -> None:
        self._generator = random.Random(seed)
        self._next: list[float] = []  # of tokens that are yet to come, in order

    def current(self, ahead: int = 0) -> float:
        """A number in [0, 1) for the next token; the same again if the step that samples it is repeated.

        Args:
            ahead: For the token so many behind that one, which gets the same number when it is its turn.
        """
        while len(self._next) <= ahead:
            self._next.append(self._generator.random())
        return self._next[ahead]

    def advance(self) -> None:
        """The token has come; the next one gets another number."""
        if self._next:
            del self._next[0]
