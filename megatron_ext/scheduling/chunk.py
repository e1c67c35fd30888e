"""What one step computes of one request: a scheduled chunk (kernels cut it into kernel chunks of their own)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.scheduling.request import Request


@dataclass(frozen=True)
class Chunk:
    """The tokens [start, end) of a request that one step computes.

    Attributes:
        request: Whose they are.
        start: The first one.
        end: Behind the last one.
        drafts: The last of them, where those are guesses (SP-2); the one before them is the request's last known token.
    """

    request: Request
    start: int
    end: int
    drafts: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Tokens."""
        return self.end - self.start

    @property
    def is_decode(self) -> bool:
        """Whether this is one generated token on top of a live state."""
        return self.end - self.start == 1 and self.start >= self.request.sequence.prompt_length

    @property
    def yields_token(self) -> bool:
        """Whether the step computes the request's last known token, so that the next one, if any, can be sampled.

        True until that one has come; the step's message keeps it (see `ScheduledChunk.sampling`).
        """
        known_end = self.end - len(self.drafts) if self.drafts else self.end
        return known_end == len(self.request.sequence.tokens) and self.request.params.num_tokens_to_generate > 0
