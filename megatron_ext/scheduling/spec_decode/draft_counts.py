"""Counts of verified and accepted drafts, by position after the last known token (SP-7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class SpeculationUse:
    """Draft statistics since the engine started.

    Attributes:
        drafted: Verified drafts by position, the first draft first: n drafts of a chunk count at each position below n.
        accepted: Accepted drafts by position.
        verifications: Number of verified chunks with drafts.
    """

    drafted: list[int]
    accepted: list[int]
    verifications: int = 0

    @classmethod
    def total(cls, parts: Sequence[SpeculationUse]) -> SpeculationUse:
        """Return the sum over several engines with the same settings."""
        return cls(
            list(map(sum, zip(*(part.drafted for part in parts), strict=True))),
            list(map(sum, zip(*(part.accepted for part in parts), strict=True))),
            sum(part.verifications for part in parts),
        )

    def note(self, drafted: int, accepted: int) -> None:
        """Count a verification."""
        self.verifications += 1
        for counts, number in ((self.drafted, drafted), (self.accepted, accepted)):
            for position in range(number):
                counts[position] += 1

    def shown(self) -> dict[str, object]:
        """Return the `speculation` object of a run's counts."""
        return {
            "num_speculative_tokens": len(self.drafted),
            "verification_count": self.verifications,
            "draft_token_count": sum(self.drafted),
            "accepted_token_count": sum(self.accepted),
            "draft_tokens_by_position": list(self.drafted),
            "accepted_tokens_by_position": list(self.accepted),
        }
