"""Trace of a server's recent requests, without text (SI-4)."""

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
MAX_TOKENS = 2**22  # prompts and outputs together: 16 MB
TRACE_BLOCK = 16  # tokens that a hash of the trace stands for: block sizes are multiples of it
_HASH_BYTES, _SALT_BYTES = 8, 16
_DOMAIN = b"mext.trace"


@dataclass(frozen=True)
class _Past:
    """Request that has ended."""

    arrival: float  # seconds since the epoch
    salt: bytes  # digest: clients choose long ones
    tokens: array[int]  # prompt, then output
    answer: int  # output tokens

    def line(self, secret: bytes, began: float) -> dict[str, object]:
        """Return the request in the simulator's format; its hashes are meaningless without the secret."""
        return {
            "time": round(max(0.0, self.arrival - began), 6),
            "block_hashes": list(self._hashes(secret)),
            "block_size": TRACE_BLOCK,
            "length": len(self.tokens) - self.answer,
            "answer_length": self.answer,
            "answer_hashed": True,
        }

    def _hashes(self, secret: bytes) -> Iterator[str]:
        """Yield the chained hash of each whole block, salted like the request."""
        content = self.tokens.tobytes()
        size = TRACE_BLOCK * self.tokens.itemsize
        state = blake2b(self.salt, digest_size=_HASH_BYTES, key=secret, person=_DOMAIN)
        for start in range(0, len(content) - size + 1, size):
            state.update(content[start : start + size])
            yield state.hexdigest()


class RequestTrace:
    """Tokens of the last requests, within limits; only keyed hashes of blocks leave the process.

    Args:
        max_requests: Maximum number of requests kept.
        max_tokens: Maximum number of tokens of all of them; the oldest requests are dropped first.
    """

    def __init__(self, max_requests: int = MAX_REQUESTS, max_tokens: int = MAX_TOKENS) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._past: deque[_Past] = deque()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._past)

    def note(self, record: RequestRecord, salt: str | None) -> None:
        """Keep an ended request that used the cache; skip one without output, for which nothing was decided."""
        answer = len(record.generated_tokens)
        tokens = array("I", record.prompt_tokens)
        tokens.extend(record.generated_tokens)
        if not answer or len(tokens) > self._max_tokens:
            return
        digest = blake2b(repr(salt).encode(), digest_size=_SALT_BYTES).digest()
        self._past.append(_Past(record.arrival_wall_time, digest, tokens, answer))
        self._tokens += len(tokens)
        while len(self._past) > self._max_requests or self._tokens > self._max_tokens:
            self._tokens -= len(self._past.popleft().tokens)

    def snapshot(self) -> Sequence[_Past]:
        """Return the requests kept so far, by arrival: input of `lines`, which takes longer."""
        return sorted(self._past, key=lambda one: one.arrival)

    @staticmethod
    def lines(past: Sequence[_Past]) -> bytes:
        """Return JSON lines whose hashes are keyed with a secret that is then discarded."""
        secret, began = secrets.token_bytes(32), past[0].arrival if past else 0.0
        return b"".join(json.dumps(one.line(secret, began)).encode() + b"\n" for one in past)
