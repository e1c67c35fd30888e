"""Counts of an engine's steps by how they were computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepCounts:
    """Counts of steps since the engine started, or of an interval.

    Attributes:
        steps: Steps that computed something.
        captured: Number of captured steps by the rows of their graph, dummy requests included; eager steps are not in.
        asynchronous: Steps that were launched before the tokens of the previous step were known.
        discarding: Steps launched so of which rows, or all, were discarded since their requests had ended.
        prefill_tokens: Prefill tokens computed, recomputed ones included.
    """

    steps: int = 0
    captured: Counter[int] = field(default_factory=Counter)
    asynchronous: int = 0
    discarding: int = 0
    prefill_tokens: int = 0

    def __sub__(self, earlier: StepCounts) -> StepCounts:
        """Return the counts of the interval that began with `earlier`."""
        return StepCounts(
            steps=self.steps - earlier.steps,
            captured=self.captured - earlier.captured,
            asynchronous=self.asynchronous - earlier.asynchronous,
            discarding=self.discarding - earlier.discarding,
            prefill_tokens=self.prefill_tokens - earlier.prefill_tokens,
        )
