"""Leaders and followers: who is computing the block that a waiting request needs next (KV-6)."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ext.prefix_cache.hash_chain import Digest


class BlocksInFlight:
    """Digests that running prefills are about to publish.

    A waiting request whose next block is among them follows the request that computes it: it waits, others overtake it,
    and then it hits. When the leader ends in any way, its digests leave, and the first follower computes them itself.
    """

    def __init__(self) -> None:
        self._leaders: dict[Digest, dict[int, None]] = {}  # in order of admission
        self._digests: dict[int, set[Digest]] = {}

    def add(self, request_id: int, digests: Iterable[Digest]) -> None:
        """`request_id` begins to compute these blocks."""
        for digest in digests:
            self._leaders.setdefault(digest, {})[request_id] = None
            self._digests.setdefault(request_id, set()).add(digest)

    def published(self, request_id: int, digest: Digest) -> None:
        """`request_id` has computed the block of `digest`."""
        if digest in self._digests.get(request_id, ()):
            self._forget(request_id, digest)

    def discard(self, request_id: int) -> None:
        """`request_id` computes nothing any more."""
        for digest in tuple(self._digests.get(request_id, ())):
            self._forget(request_id, digest)

    def _forget(self, request_id: int, digest: Digest) -> None:
        for table, key, value in ((self._leaders, digest, request_id), (self._digests, request_id, digest)):
            members = table[key]
            members.pop(value) if isinstance(members, dict) else members.discard(value)
            if not members:
                del table[key]

    def leader(self, digest: Digest) -> int | None:
        """The request that computes `digest`, the first if there are several; None if nobody does."""
        return next(iter(self._leaders.get(digest, ())), None)

    def requests(self) -> set[int]:
        """Ids of the requests that compute something that others could wait for."""
        return set(self._digests)
