"""Block hashes of requests: their roots, and hashing before prompts are matched: on arrival, then a slice per step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_ext.prefix_cache.hash_chain import BlockHash, root_hash
from megatron_ext.scheduling.request import Request

HASH_SLICE = 32_768  # tokens; about a millisecond of hashing


class CacheKeys:
    """Roots of block hashes: everything except the tokens that KV and states depend on.

    Args:
        fingerprint: Fingerprint of the model and of how it computes.
        block_size: Tokens of a block.
    """

    def __init__(self, fingerprint: bytes, block_size: int) -> None:
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._weights_version = 0

    def weights_changed(self) -> None:
        """Use new roots from now on, since the weights have changed."""
        self._weights_version += 1

    def root(self, salt: str | None) -> BlockHash:
        """Return the root of the block hashes of sequences with a salt."""
        return root_hash(
            [
                self._fingerprint,
                self._weights_version.to_bytes(8, "little"),
                self._block_size.to_bytes(8, "little"),
                *([] if salt is None else [salt.encode("utf-8", "surrogatepass")]),  # JSON may contain lone surrogates
            ]
        )


class BlockHasher:
    """Queue of requests that have tokens left to hash, in order of arrival.

    A slice may be begun before its step is planned, while the device computes the step before. That step then hashes
    only the rest of the slice, so that the same tokens are hashed at any plan as without. Tokens begun for requests
    that have ended since, or that hash anew, are not counted.

    Args:
        block_size: Tokens of a block; fewer are not hashed alone, so the last block of a slice may exceed it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._unfinished: dict[Request, None] = {}
        self._begun: list[tuple[Request, int, int]] = []  # request, tokens hashed, tokens left to hash then

    def begin(self, request: Request) -> None:
        """Hash the first slice of a request that has arrived."""
        request.hash_ahead(HASH_SLICE)
        self.resume(request)

    def resume(self, request: Request) -> None:
        """Hash the rest of `request` in later steps."""
        if request.unhashed_tokens:
            self._unfinished[request] = None

    def is_due(self, request: Request) -> bool:
        """Return whether a later step hashes the rest of `request`; the same on all ranks, whatever is hashed ahead."""
        return request in self._unfinished

    def begin_slice(self) -> None:
        """Hash the part of the next slice that is not begun yet, in whole blocks."""
        left = HASH_SLICE - self._counted()
        for request in self._unfinished:
            while left >= self._block_size and _is_unfinished(request):
                left -= self._hash(request, left)

    def go_on(self) -> None:
        """Hash one slice or the rest of one; requests that are already hashed or have ended cost nothing."""
        left = HASH_SLICE - self._counted()
        self._begun.clear()
        while self._unfinished:
            request = next(iter(self._unfinished))
            if left <= 0 and _is_unfinished(request):
                break
            left -= self._hash(request, left)
            if not _is_unfinished(request):
                del self._unfinished[request]
        self._begun.clear()

    def _hash(self, request: Request, max_tokens: int) -> int:
        """Hash at most `max_tokens` tokens of `request` and return their number."""
        before = request.unhashed_tokens
        if not before or request.is_ended:
            return 0
        request.hash_ahead(max_tokens)
        left = request.unhashed_tokens
        self._begun.append((request, before - left, left))
        return before - left

    def _counted(self) -> int:
        """Tokens of the slice that are hashed already and still of use."""
        return sum(
            count for request, count, left in self._begun if not request.is_ended and request.unhashed_tokens <= left
        )


def _is_unfinished(request: Request) -> bool:
    return not request.is_ended and request.unhashed_tokens > 0


def within_slice(requests: Iterable[Request], max_tokens: int) -> Iterator[Request]:
    """Yield requests while at most `max_tokens` tokens have to be hashed to match them; the first one in any case."""
    for i, request in enumerate(requests):
        max_tokens -= request.unhashed_tokens
        if i > 0 and max_tokens < 0:
            return
        yield request
