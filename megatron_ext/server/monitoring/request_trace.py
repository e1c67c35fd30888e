"""The requests of a server's recent past, as a trace without text (SI-4)."""

from __future__ import annotations

import json
import secrets
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from megatron_ext.scheduling.record import RequestRecord

MAX_REQUESTS = 10_000
MAX_TOKENS = 2**22  # of prompts and answers together: 16 MB
TRACE_BLOCK = 16  # tokens that a hash of the trace stands for: block sizes are multiples of it
_HASH_BYTES = 8
_DOMAIN = b"mext.trace"


@dataclass(frozen=True)
class _Past:
    """A request that has ended."""

    arrival: float  # seconds since the epoch
    salt: str | None
    tokens: array[int]  # of its prompt, then of its answer
    answer: int  # tokens

    def line(self, secret: bytes, began: float) -> dict[str, object]:
        """In the simulator's format; hashes mean nothing without the secret."""
        return {
            "time": round(max(0.0, self.arrival - began), 6),
            "block_hashes": list(self._hashes(secret)),
            "block_size": TRACE_BLOCK,
            "length": len(self.tokens) - self.answer,
            "answer_length": self.answer,
            "answer_hashed": True,
        }

    def _hashes(self, secret: bytes) -> Iterator[str]:
        """Of each whole block, and all before it, with the salt."""
        content = self.tokens.tobytes()
        size = TRACE_BLOCK * self.tokens.itemsize
        state = blake2b(repr(self.salt).encode(), digest_size=_HASH_BYTES, key=secret, person=_DOMAIN)
        for start in range(0, len(content) - size + 1, size):
            state.update(content[start : start + size])
            yield state.hexdigest()


class RequestTrace:
    """Tokens of the last requests, as long as they fit; what leaves the process are keyed hashes of blocks.

    Args:
        max_requests: To keep.
        max_tokens: Of all of them; the oldest go first.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._past: deque[_Past] = deque()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._past)

    def note(self, record: RequestRecord, salt: str | None) -> None:
        """A request has ended that used the cache; one without an answer is left out, as nothing was decided for it."""
        answer = len(record.generated_tokens)
        tokens = array("I", record.prompt_tokens)
        tokens.extend(record.generated_tokens)
        if not answer or len(tokens) > self._max_tokens:
            return
        self._past.append(_Past(record.arrival_wall_time, salt, tokens, answer))
        self._tokens += len(tokens)
        while len(self._past) > self._max_requests or self._tokens > self._max_tokens:
            self._tokens -= len(self._past.popleft().tokens)

    def snapshot(self) -> Sequence[_Past]:
        """What there is, by arrival: for `lines`, which takes longer."""
        return sorted(self._past, key=lambda one: one.arrival)

    @staticmethod
    def lines(past: Sequence[_Past]) -> bytes:
        """JSON lines, with a secret that nobody keeps."""
        secret, began = secrets.token_bytes(32), past[0].arrival if past else 0.0
        return b"".join(json.dumps(one.line(secret, began)).encode() + b"\n" for one in past)
