"""Where requests have parted from what was cached, and found no states there that somebody had asked for (SI-1)."""

from __future__ import annotations

from collections import Counter, deque

MAX_DIVERGENCES = 512  # that are remembered
_SHOWN_EVERY = 8  # divergences, so that those who place snapshots by them seldom have to begin anew
MAX_DEPTHS = 64  # that are shown, the commonest

Depths = tuple[tuple[int, int], ...]
"""(blocks from the start, how many parted there), by depth."""


class Divergences:
    """A bounded record, the oldest goes first. It outlives a reset: what comes is of the same users.

    Attributes:
        shown: What is known; replaced as a whole now and then, by count, so that all ranks agree.
    """

    def __init__(self) -> None:
        self._record: deque[int] = deque(maxlen=MAX_DIVERGENCES)
        self._noted = 0
        self.shown: Depths = ()

    def note(self, depth: int) -> None:
        """A request has parted behind `depth` blocks."""
        self._record.append(depth)
        self._noted += 1
        if self._noted % _SHOWN_EVERY == 0:
            commonest = Counter(self._record).most_common(MAX_DEPTHS)  # of equal ones those noted first
            self.shown = tuple(sorted(commonest))
