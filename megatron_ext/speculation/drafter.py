"""Drafter: proposes next tokens of decoding requests. A draft affects speed and never a token (SP-3).

A drafter runs beside the engine of rank 0 and is called before each step is planned. Its proposals are checked (see
`speculation.proposals`): ids outside the vocabulary, more drafts than requested, and errors cost the drafts, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftRequest:
    """Decoding request that may have drafts in the next step.

    Attributes:
        request_id: Id of the request; the same for as long as it lives.
        tokens: Tokens of prompt and generation; must not be changed or kept.
        limit: Maximum number of drafts, at least 1: K, the number that the request allows, the room up to its last
            token, and up to the next block boundary where only the ends of chunks leave snapshots.
    """

    request_id: int
    tokens: Sequence[int]
    limit: int


class Drafter:
    """Source of drafts; one request's drafts may depend on that request's own tokens only.

    A drafter may have pools of its own, which are freed and allocated together with the engine's.

    Attributes:
        idle_steps: Steps after the last call in which another one is not worth its time.
        parts: Drafters that this one proposes with; all other calls are passed on to them.
    """

    idle_steps: int = 0
    parts: Sequence[Drafter] = ()

    def propose(self, requests: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Return, by request id, the tokens predicted to come next, in order; empty or no entry without a prediction.

        Args:
            requests: Decoding requests, each once.
        """
        raise NotImplementedError

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        """Handle the verification of a request's drafts by a step; by default the next proposal reads the tokens.

        Args:
            request_id: Id of the request.
            drafted: Number of verified drafts: at least 1, and at most as many as were proposed.
            accepted: Number of accepted drafts, from the first on.
        """
        for one in self.parts:
            one.accepted(request_id, drafted, accepted)

    def forget(self, request_id: int) -> None:
        """Forget a request that has ended; it may have had no drafts at all."""
        for one in self.parts:
            one.forget(request_id)

    def reset(self) -> None:
        """Forget all requests."""
        for one in self.parts:
            one.reset()

    def notice_new_weights(self) -> None:
        """Forget all results of the target model's old weights."""
        for one in self.parts:
            one.notice_new_weights()

    def suspend(self) -> None:
        """Free the pools."""
        for one in self.parts:
            one.suspend()

    def resume(self) -> None:
        """Allocate the pools again.

        Raises:
            ConfigError: There is less memory than seemed to be free.
        """
        for one in self.parts:
            one.resume()
