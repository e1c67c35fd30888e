"""Outcome of a forwarded request for its log line: replica, response id, and tokens skipped."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_ext.server.access import UNKNOWN

_ID = re.compile(rb'"id": ?"([\w.:-]{1,100})"')
_CACHED = (b'"cached_tokens":', b'"cache_read_input_tokens":')  # OpenAI's name, and Anthropic's
_SKIPPED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)": ?(\d{1,18})')


@dataclass
class Outcome:
    """Outcome of a request, as far as it is known.

    Attributes:
        replica: URL of the replica that answers, or was tried last; None before the first.
        tries: Number of replicas tried.
        expected: Prompt tokens that the router expected the replica to skip.
        request_id: Id of the response; None without one.
        skipped: Prompt tokens that the replica skipped, if the response has its usage.
    """

    replica: str | None = None
    tries: int = 0
    expected: int = 0
    request_id: str | None = None
    skipped: int | None = None

    def sent_to(self, replica: str, expected: int) -> None:
        """Record that a replica is tried."""
        self.replica, self.expected = replica, expected
        self.tries += 1

    def read(self, content: bytes) -> None:
        """Read the id and the usage from an answer, or from a part of a stream."""
        if self.request_id is None and (found := _ID.search(content)):
            self.request_id = found[1].decode()
        start = max(map(content.rfind, _CACHED))
        if start >= 0 and (found := _SKIPPED.match(content, start)):
            self.skipped = int(found[1])

    def describe(self) -> tuple[str, str]:
        """Return the response id, and the rest as text for the log line."""
        if self.replica is None:
            return UNKNOWN, ""
        skipped = UNKNOWN if self.skipped is None else str(self.skipped)
        tries = f" tries={self.tries}" if self.tries > 1 else ""
        return self.request_id or UNKNOWN, f" replica={self.replica} skipped={skipped} expected={self.expected}{tries}"
