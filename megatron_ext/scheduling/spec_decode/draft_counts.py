"""How many drafts were verified, and how many came, by their position behind the last known token (SP-7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class SpeculationUse:
    """What became of drafts since the engine started.

    Attributes:
        max_drafts: Of a request in a step.
        verifications: Steps of a request that had drafts.
        drafted: By position, the first draft first.
        accepted: Those of them that came.
    """

    max_drafts: int
    verifications: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def total(cls, parts: Sequence[SpeculationUse]) -> SpeculationUse:
        """Of several engines with the same settings."""
        return cls(
            parts[0].max_drafts,
            sum(part.verifications for part in parts),
            tuple(map(sum, zip(*(part.drafted for part in parts), strict=True))),
            tuple(map(sum, zip(*(part.accepted for part in parts), strict=True))),
        )

    def shown(self) -> dict[str, object]:
        """The `speculation` object of the JSON output."""
        return {
            "num_speculative_tokens": self.max_drafts,
            "verification_count": self.verifications,
            "draft_token_count": sum(self.drafted),
            "accepted_token_count": sum(self.accepted),
            "draft_tokens_by_position": list(self.drafted),
            "accepted_tokens_by_position": list(self.accepted),
        }


class DraftCounts:
    """Counts verifications by how many drafts they had, and how many came.

    Args:
        max_drafts: Of a request in a step.
    """

    def __init__(self, max_drafts: int) -> None:
        self._drafted, self._accepted = [0] * (max_drafts + 1), [0] * (max_drafts + 1)  # by number of drafts

    def note(self, drafted: int, accepted: int) -> None:
        """A verification."""
        self._drafted[drafted] += 1
        self._accepted[accepted] += 1

    def use(self) -> SpeculationUse:
        """All of them, by position: a draft stands at position i where there were more than i."""
        return SpeculationUse(
            len(self._drafted) - 1, sum(self._drafted), _more_than(self._drafted), _more_than(self._accepted)
        )


def _more_than(counts: Sequence[int]) -> tuple[int, ...]:
    """For i = 0, 1, ... how many counted more than i."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]
