"""Leaders and followers: who is computing the block that a waiting request needs next (KV-6)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.prefix_cache.hash_chain import Digest


class BlocksInFlight:
    """Digests that running prefills are about to publish.

    A waiting request whose next block is among them follows the request that computes it: it waits, others overtake it,
    and then it hits. When the leader ends in any way, its digests leave, and the first follower computes them itself.
    """

    def __init__(self) -> None:
        self._leaders: dict[Digest, list[int]] = {}

    def add(self, request_id: int, digests: Sequence[Digest]) -> None:
        """`request_id` has begun to compute these blocks."""
        for digest in digests:
            self._leaders.setdefault(digest, []).append(request_id)

    def discard(self, request_id: int, digests: Sequence[Digest]) -> None:
        """`request_id` has published these blocks, or will not."""
        for digest in digests:
            leaders = self._leaders[digest]
            leaders.remove(request_id)
            if not leaders:
                del self._leaders[digest]

    def leader(self, digest: Digest) -> int | None:
        """The first request that computes `digest`, or None."""
        leaders = self._leaders.get(digest)
        return leaders[0] if leaders else None

    def __len__(self) -> int:
        return len(self._leaders)
