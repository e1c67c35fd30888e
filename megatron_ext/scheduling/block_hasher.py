"""Hashing of waiting prompts before they are looked at: a slice on arrival, the rest a slice a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from megatron_ext.scheduling.request import Request

HASH_SLICE = 32_768  # tokens; about a millisecond of hashing


class BlockHasher:
    """Who still has tokens to hash, in the order in which they came.

    A slice may be begun before its step is planned, while the device computes the one before. Then its step hashes what
    is left of it, so that what is hashed at any plan is the same as without: what was begun for requests that have
    ended since, or that hash anew, is not counted.

    Args:
        block_size: Tokens; fewer are not hashed alone, so the last block of a slice may exceed it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._unfinished: deque[Request] = deque()
        self._begun: list[tuple[Request, int, int]] = []  # whose, tokens, and how many were left to hash then

    def begin(self, request: Request) -> None:
        """A request has arrived: hash its first slice now."""
        request.sequence.hash_ahead(HASH_SLICE)
        self.resume(request)

    def resume(self, request: Request) -> None:
        """Hash what is left of it in steps to come."""
        if request.sequence.unhashed_tokens:
            self._unfinished.append(request)

    def begin_slice(self) -> None:
        """Hash of the next slice what is not begun yet, as far as whole blocks are within it."""
        left = HASH_SLICE - self._counted()
        for request in self._unfinished:
            while left >= self._block_size and _is_unfinished(request):
                left -= self._hash(request, left)

    def go_on(self) -> None:
        """Hash one slice, or the rest of one; requests that are hashed by now, or have ended, cost nothing."""
        left = HASH_SLICE - self._counted()
        self._begun.clear()
        while self._unfinished and (left > 0 or not _is_unfinished(self._unfinished[0])):
            request = self._unfinished[0]
            left -= self._hash(request, left)
            if not _is_unfinished(request):
                self._unfinished.popleft()
        self._begun.clear()

    def _hash(self, request: Request, most: int) -> int:
        """Tokens that were hashed."""
        before = request.sequence.unhashed_tokens
        if not before or request.is_ended:
            return 0
        request.sequence.hash_ahead(most)
        left = request.sequence.unhashed_tokens
        self._begun.append((request, before - left, left))
        return before - left

    def _counted(self) -> int:
        """Tokens of the slice that are begun, and still of use."""
        return sum(
            count
            for request, count, left in self._begun
            if not request.is_ended and request.sequence.unhashed_tokens <= left
        )


def _is_unfinished(request: Request) -> bool:
    return not request.is_ended and request.sequence.unhashed_tokens > 0


def within_slice(requests: Iterable[Request], most: int) -> Iterator[Request]:
    """The requests, as far as no more than `most` tokens have to be hashed to look at them; the first in any case."""
    for i, request in enumerate(requests):
        most -= request.sequence.unhashed_tokens
        if i > 0 and most < 0:
            return
        yield request
