"""Fast forward: decoding requests to which nothing happens for some steps but another token.

Used by the simulator, which knows the tokens in advance. In these *uniform* steps of a request it does not begin or
end, fills no block and needs none, so the scheduler would only append its token. Such a request *rests*: until its
next other step it is in the queue of resting requests, not in that of running ones, and the scheduler's limits are as
much smaller. Steps without other requests than resting ones are taken at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler


class Answers(Protocol):
    """Source of the tokens that requests will generate."""

    def __call__(self, request: Request, count: int) -> Sequence[int]:
        """Return the next `count` tokens of a request."""


def uniform_steps(request: Request, block_size: int) -> int:
    """Return how many steps only add a token: those before the last block is full or the last token comes."""
    sequence = request.sequence
    if not sequence.is_decoding or sequence.snapshots:
        return 0
    to_come = request.params.num_tokens_to_generate - sequence.generated_count
    return max(0, min(to_come, len(sequence.block_table) * block_size - sequence.computed_end) - 1)


class RestingDecodes:
    """Requests that rest; those of one scheduler, whose requests end by count alone and have no drafts.

    Args:
        scheduler: Scheduler of the requests.
        answers: Source of their tokens.

    Attributes:
        positions: Sum of the requests' positions in the next step.
    """

    def __init__(self, scheduler: Scheduler, answers: Answers) -> None:
        self.positions = 0
        self._scheduler, self._answers = scheduler, answers
        self._limits = {0: scheduler.limits}  # by the number of resting requests
        self._resting: list[tuple[int, int, int, Request]] = []  # heap: wakes before this step, arrival, since, request

    def __len__(self) -> int:
        return len(self._resting)

    @property
    def first_step(self) -> int:
        """Number of the first step before which a request has to wake; there is a resting request."""
        return self._resting[0][0]

    def rest(self, step: int) -> None:
        """Let the running requests rest whose step number `step`, the next one, is uniform.

        None may rest where prompts are not cut, since the limits then decide on whole prompts.
        """
        queues, limits = self._scheduler.queues, self._limits[0]
        if not limits.chunked_prefill:
            return
        for request in queues.running:
            count = uniform_steps(request, limits.block_size)
            if count:
                queues.move(request, queues.resting)
                heappush(self._resting, (step + count, request.arrival, step, request))
                self.positions += request.computed_end
        self._limit()

    def leap(self, count: int) -> None:
        """Advance by so many steps."""
        self.positions += count * len(self._resting)

    def wake(self, step: int) -> None:
        """Let those run on before step number `step` for which it is not uniform.

        All run on if no block is available: a paused request is preempted if no other one can run.
        """
        last = math.inf if self._scheduler.cache.available_count == 0 else step
        if not self._resting or self._resting[0][0] > last:
            return
        queues, counters = self._scheduler.queues, self._scheduler.counters
        while self._resting and self._resting[0][0] <= last:
            _, _, since, request = heappop(self._resting)
            sequence, new = request.sequence, self._answers(request, step - since)
            sequence.extend(new)
            request.timeline.step_count += len(new)
            counters.prefill_tokens += sequence.advance(sequence.computed_end + len(new))
            self.positions -= sequence.computed_end
            queues.move(request, queues.running)
        self._limit()

    def _limit(self) -> None:
        """Give the scheduler the limits that resting requests leave to the others."""
        count, all_ = len(self._resting), self._limits[0]
        if count not in self._limits:
            requests, tokens = all_.max_requests - count, all_.max_tokens - count
            self._limits[count] = dataclasses.replace(all_, max_requests=requests, max_tokens=tokens)
        self._scheduler.limits = self._limits[count]
