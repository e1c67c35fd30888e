"""Counts of verified and accepted drafts, by position after the last known token (SP-7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class SpeculationUse:
    """Draft statistics since the engine started.

    Attributes:
        max_drafts: Maximum number of drafts of a request in a step.
        verifications: Number of verified chunks with drafts.
        drafted: Verified drafts by position, the first draft first.
        accepted: Accepted drafts by position.
    """

    max_drafts: int
    verifications: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def total(cls, parts: Sequence[SpeculationUse]) -> SpeculationUse:
        """Return the sum over several engines with the same settings."""
        return cls(
            parts[0].max_drafts,
            sum(part.verifications for part in parts),
            tuple(map(sum, zip(*(part.drafted for part in parts), strict=True))),
            tuple(map(sum, zip(*(part.accepted for part in parts), strict=True))),
        )

    def shown(self) -> dict[str, object]:
        """Return the `speculation` object of a run's counts."""
        return {
            "num_speculative_tokens": self.max_drafts,
            "verification_count": self.verifications,
            "draft_token_count": sum(self.drafted),
            "accepted_token_count": sum(self.accepted),
            "draft_tokens_by_position": list(self.drafted),
            "accepted_tokens_by_position": list(self.accepted),
        }


class DraftCounts:
    """Counts of verifications by number of drafts and by number of accepted ones.

    Args:
        max_drafts: Maximum number of drafts of a request in a step.
    """

    def __init__(self, max_drafts: int) -> None:
        self._drafted, self._accepted = [0] * (max_drafts + 1), [0] * (max_drafts + 1)  # by number of drafts

    def note(self, drafted: int, accepted: int) -> None:
        """Count a verification."""
        self._drafted[drafted] += 1
        self._accepted[accepted] += 1

    def use(self) -> SpeculationUse:
        """Return the statistics by position: a verification with n drafts has one at each position below n."""
        return SpeculationUse(
            len(self._drafted) - 1, sum(self._drafted), _more_than(self._drafted), _more_than(self._accepted)
        )


def _more_than(counts: Sequence[int]) -> tuple[int, ...]:
    """Return, for i = 0, 1, ..., the number of verifications that counted more than i."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]
