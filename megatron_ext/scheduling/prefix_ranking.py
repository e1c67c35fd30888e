"""Ranking of waiting requests by the tokens that they can skip, under the schedule policy `lpm`.

A request is matched when it arrives. The result changes as others publish and evict entries, so before each step some
requests are matched again: the first ones, and some of the rest in turns. Both happen at the same points of all
ranks' histories.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling.block_hasher import BlockHasher
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.planner import reads_cache, resume_of
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request

# A match takes 6 microseconds, so these take a fifth of the time of planning a step; a queue of 8 is known exactly.
MATCHED_AGAIN = 8
FIRST = MATCHED_AGAIN // 2  # of these; the others are matched in turns


class PrefixRanking:
    """Ranks of one scheduler's waiting requests.

    Args:
        limits: Limits of the scheduler.
        queues: Queues of the scheduler.
        cache: Cache of the scheduler.
        hashing: Block hasher of the scheduler.
    """

    def __init__(self, limits: SchedulerLimits, queues: Queues, cache: PrefixCache, hashing: BlockHasher) -> None:
        self._limits, self._queues, self._cache, self._hashing = limits, queues, cache, hashing
        self._order = queues.waiting.order
        self._turn = 0
        self._is_on = self._order.budgets is not None and cache.is_enabled

    def refresh(self) -> None:
        """Match waiting requests again if one may enter, and evict what the first ones match after all else."""
        if not self._is_on:
            return
        awake, queues = self._order.awake, self._queues
        if len(queues.running) + len(queues.paused) < self._limits.max_requests:
            places = {*range(min(FIRST, len(awake)))}
            while len(places) < min(MATCHED_AGAIN, len(awake)):  # from the end, since requests move towards the start
                self._turn = min(self._turn or len(awake), len(awake)) - 1
                places.add(self._turn)
            self.rank([awake[place] for place in places])
        self._cache.spare([request.block_hashes for request in awake[:MATCHED_AGAIN] if self._is_hashed(request)])

    def rank(self, requests: Iterable[Request]) -> None:
        """Match awake requests, and put them at their places."""
        for request in requests if self._is_on else ():
            self._order.rank(request, self._skipped(request))

    def _is_hashed(self, request: Request) -> bool:
        return reads_cache(request) and not self._hashing.is_due(request)

    def _skipped(self, request: Request) -> int:
        """Return the tokens that a request would skip if it were admitted now; 0 before it is hashed."""
        if not self._is_hashed(request):
            return 0
        return resume_of(request, self._cache.match(request.block_hashes), self._limits, self._cache).position
