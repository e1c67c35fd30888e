"""Hashing of waiting prompts before they are looked at: a slice on arrival, the rest a slice a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from megatron_ext.scheduling.request import Request

HASH_SLICE = 32_768  # tokens; about a millisecond of hashing


class AheadHashing:
    """Who still has tokens to hash, in the order in which they came."""

    def __init__(self) -> None:
        self._unfinished: deque[Request] = deque()

    def begin(self, request: Request) -> None:
        """A request has arrived: hash its first slice now."""
        request.sequence.hash_ahead(HASH_SLICE)
        self.resume(request)

    def resume(self, request: Request) -> None:
        """Hash what is left of it in steps to come."""
        if request.sequence.unhashed_tokens:
            self._unfinished.append(request)

    def go_on(self) -> None:
        """Hash one slice; requests that are hashed by now, or have ended, cost nothing."""
        left = HASH_SLICE
        while self._unfinished and left > 0:
            request = self._unfinished[0]
            before = request.sequence.unhashed_tokens
            if before and not request.is_ended:
                request.sequence.hash_ahead(left)
                left -= before - request.sequence.unhashed_tokens
            if request.is_ended or not request.sequence.unhashed_tokens:
                self._unfinished.popleft()


def within_slice(requests: Iterable[Request], most: int) -> Iterator[Request]:
    """The requests, as far as no more than `most` tokens have to be hashed to look at them; the first in any case."""
    for i, request in enumerate(requests):
        most -= request.sequence.unhashed_tokens
        if i > 0 and most < 0:
            return
        yield request
