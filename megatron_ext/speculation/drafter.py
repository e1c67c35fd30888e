"""Who guesses the next tokens of decoding requests. A guess costs or saves steps; it never changes a token (SP-3).

A drafter lives beside the engine of one rank, rank 0, and is asked before each step is planned. Its answers are
checked (see `speculation.proposals`): what is no token of the vocabulary, what is more than was asked for, and an error
cost the drafts, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DraftAsk:
    """A decoding request that may have drafts in the next step.

    Attributes:
        request_id: Whose they would be; the same for as long as it lives.
        tokens: Of its prompt, and generated so far; not to be changed, and not to be kept.
        limit: At most so many drafts, at least 1: K, what the request asks for, the room up to its last token, and up
            to the next block boundary where states are kept at the ends of chunks only.
    """

    request_id: int
    tokens: Sequence[int]
    limit: int


class Drafter(Protocol):
    """Proposes what comes next; one request's drafts may depend on that request's own tokens only."""

    def propose(self, asks: Sequence[DraftAsk]) -> Mapping[int, tuple[int, ...]]:
        """Request id -> the tokens that it guesses to come next, in order; none, or no entry, where it guesses nothing.

        Args:
            asks: Each request once.
        """

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """A step has verified drafts of a request.

        Args:
            request_id: Whose they were.
            drafted: Drafts that the step verified: at least 1, and at most as many as were proposed.
            accepted: How many of them came, from the first on.
        """

    def forget(self, request_id: int) -> None:
        """The request has ended; it may have had no drafts at all."""
