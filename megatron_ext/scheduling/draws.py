"""Random numbers of one request."""

from __future__ import annotations

import random


class Draws:
    """Uniform numbers for a request's tokens, one a token, from a generator of its own.

    Args:
        seed: All that they depend on.
    """

    def __init__(self, seed: int | str) -> None:
        self._generator = random.Random(seed)
        self._current: float | None = None

    def current(self) -> float:
        """A number in [0, 1) for the next token; the same again if the step that samples it is repeated."""
        if self._current is None:
            self._current = self._generator.random()
        return self._current

    def advance(self) -> None:
        """The token has come; the next one gets another number."""
        self._current = None
