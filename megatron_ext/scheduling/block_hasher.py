"""Hashing of prompts before they are matched: on arrival, then a slice per step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_ext.scheduling.request import Request

HASH_SLICE = 32_768  # tokens; about a millisecond of hashing


class BlockHasher:
    """Queue of requests that have tokens left to hash, in order of arrival."""

    def __init__(self) -> None:
        self._unfinished: dict[Request, None] = {}

    def begin(self, request: Request) -> None:
        """Hash the first slice of a request that has arrived."""
        request.hash_ahead(HASH_SLICE)
        self.resume(request)

    def resume(self, request: Request) -> None:
        """Hash the rest of `request` in later steps."""
        if request.unhashed_tokens:
            self._unfinished[request] = None

    def is_due(self, request: Request) -> bool:
        """Return whether a later step hashes the rest of `request`."""
        return request in self._unfinished

    def hash_slice(self) -> None:
        """Hash one slice, in whole blocks; requests that are already hashed or have ended cost nothing."""
        left = HASH_SLICE
        while self._unfinished:
            request = next(iter(self._unfinished))
            if _is_unfinished(request):
                if left <= 0:
                    return
                before = request.unhashed_tokens
                request.hash_ahead(left)
                left -= before - request.unhashed_tokens
            if not _is_unfinished(request):
                del self._unfinished[request]


def _is_unfinished(request: Request) -> bool:
    return not request.is_ended and request.unhashed_tokens > 0


def within_slice(requests: Iterable[Request], max_tokens: int) -> Iterator[Request]:
    """Yield requests while at most `max_tokens` tokens have to be hashed to match them; the first one in any case."""
    for i, request in enumerate(requests):
        max_tokens -= request.unhashed_tokens
        if i > 0 and max_tokens < 0:
            return
        yield request
