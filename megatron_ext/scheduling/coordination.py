"""Leaders and followers: who is computing the block that a waiting request needs next (KV-6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import Digest
from megatron_ext.prefix_cache.matching import last_boundary, resume_point
from megatron_ext.scheduling.plan import Admission, Limits, Refusal, Room, Wish
from megatron_ext.scheduling.request import Chunk, Request
from megatron_ext.scheduling.snapshots import common_blocks


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


class Leaders:
    """Who computes what: running requests, and those that this step admits."""

    def __init__(self, running: Iterable[Request], in_flight: BlocksInFlight) -> None:
        self._running = {request.request_id: request for request in running}
        self._in_flight = in_flight
        self._planned: dict[Digest, Chunk] = {}

    def add(self, admission: Admission) -> None:
        """This one is about to compute what it did not match."""
        digests = admission.request.digests[len(admission.matched) :]
        self._planned |= dict.fromkeys(digests, admission.chunk)

    def of(self, request: Request, matched: int) -> tuple[Request, int] | None:
        """The request that computes the first block that `request` lacks, and what it has computed before this step."""
        if matched == len(request.digests):
            return None
        following = request.digests[matched]
        if following in self._planned:
            chunk = self._planned[following]
            return chunk.request, chunk.start
        request_id = self._in_flight.leader(following)
        if request_id is None:
            return None
        leader = self._running[request_id]
        return leader, leader.computed_end


def follow(
    request: Request,
    matched: int,
    leader: tuple[Request, int],
    limits: Limits,
    room: Room,
    cache: PrefixCache,
    wished: Collection[Digest],
) -> Refusal | None:
    """Wait for the leader, if that saves anything: None if not.

    With recurrent layers it does if the leader has yet to pass the last boundary that both have in common, and a slot
    can be had for the states there.
    """
    leading, computed_end = leader
    refusal = Refusal(request, "prefix", 1, 0, wait_for=leading.request_id)
    if cache.states is None:
        return refusal
    block_size = limits.block_size
    digests = request.digests
    common = common_blocks(digests, leading.digests) * block_size
    position = min(common, last_boundary(len(request.tokens), block_size))
    resume = resume_point(len(request.tokens), digests[:matched], block_size, cache.states)
    if position <= max(computed_end, resume.position):
        return None
    digest = digests[position // block_size - 1]
    if cache.states.is_reserved(digest):
        return refusal
    if digest not in wished and room.slots < 1:
        return None
    return dataclasses.replace(refusal, wish=Wish(leading, position, digest))
