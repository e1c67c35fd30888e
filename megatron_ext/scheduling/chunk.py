"""Scheduled chunk: the tokens of one request in one step (kernels cut it into kernel chunks of their own)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.scheduling.request import Request


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a request that one step computes.

    Attributes:
        request: Request that the tokens belong to.
        start: Position of the first token.
        end: Position after the last token.
        drafts: Draft tokens at the end of the chunk (SP-2); the token before them is the request's last known one.
        source: Chunk of another request that ends the same prompt in this step, if this is a fork; its own chunk is
            empty, and its token comes from the source's last logits.
    """

    request: Request
    start: int
    end: int
    drafts: tuple[int, ...] = ()
    source: Chunk | None = None

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return self.end - self.start

    @property
    def is_decode(self) -> bool:
        """True if the chunk is one generated token on top of a running state."""
        return self.end - self.start == 1 and self.start >= self.request.prompt_length

    @property
    def yields_token(self) -> bool:
        """True if the step computes the request's last known token, so that the next one, if any, can be sampled.

        Valid until that token is appended; the step's message keeps the value (see `ScheduledChunk.sampling`).
        """
        known_end = self.end - len(self.drafts) if self.drafts else self.end
        return known_end == len(self.request.tokens) and self.request.params.num_tokens_to_generate > 0
