"""A trace through the scheduler that serves: the same plans, the same cache, and tokens that the trace knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.planner import check_admissible
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from megatron_ext.scheduling.submission import Submission
from megatron_ext.simulation.fast_forward import fast_forward, uniform_steps
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.trace import Turn, by_session


@dataclass
class Outcome:
    """What a trace gave, by the place of each turn in it."""

    prompt: list[int]  # tokens
    skipped: list[int] = field(default_factory=list)
    ttft: list[float | None] = field(default_factory=list)  # simulated seconds; None for one that was not served
    refused: int = 0  # longer than the model or the pool
    steps: int = 0
    seconds: float = 0.0  # simulated
    statistics: EngineStatistics | None = None  # at the end

    @property
    def skipped_share(self) -> float:
        """Of all prompt tokens."""
        return sum(self.skipped) / max(1, sum(self.prompt))

    def ttft_percentile(self, percent: float) -> float:
        """Simulated seconds; 0 if nothing was served."""
        served = sorted(one for one in self.ttft if one is not None)
        return served[min(len(served) - 1, int(len(served) * percent / 100))] if served else 0.0


class Replay:
    """One run of a trace.

    Args:
        turns: Of all sessions.
        limits: Of the scheduler; its costs are the model's.
        policy: None caches nothing.
        slots: Of snapshots; None for a model without recurrent layers.
        machine: Says what a step takes.

    Attributes:
        coming: When turns arrive that are known by now, and their places in the trace; a heap.
        outcome: So far.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        limits: SchedulerLimits,
        policy: EvictionPolicyName | None,
        slots: int | None,
        machine: Machine | None = None,
    ) -> None:
        self.scheduler = Scheduler(limits, policy, b"simulation", slots)
        self.outcome = Outcome([turn.prompt_length for turn in turns])
        self.outcome.skipped = [0] * len(turns)
        self.outcome.ttft = [None] * len(turns)
        self._turns, self._machine = turns, machine or Machine()
        self._now = 0.0
        self.coming: list[tuple[float, int]] = []
        self._replies = _replies(turns)
        self._asked_at: dict[int, float] = {}
        for place, turn in enumerate(turns):
            if not turn.is_reply:
                heappush(self.coming, (turn.time, place))

    def run(self) -> Outcome:
        """To the end."""
        queues = self.scheduler.queues
        while self.coming or len(queues):
            if not len(queues):
                self._now = max(self._now, self.coming[0][0])
            while self.coming and self.coming[0][0] <= self._now:
                self.submit(heappop(self.coming)[1])
            if len(queues) and not self.fast_forward():
                self.step()
        self.outcome.seconds = self._now
        self.outcome.statistics = self.statistics()
        return self.outcome

    def statistics(self) -> EngineStatistics:
        """As an engine's."""
        return EngineStatistics.of(self.scheduler, ended=len(self._asked_at), steps=self.outcome.steps)

    def submit(self, place: int) -> None:
        """A turn arrives now."""
        turn = self._turns[place]
        params = _params(len(turn.answer), turn.salt)
        request = Request(Submission(place, turn.tokens(), params, arrival=len(self._asked_at), seed=0))
        self._asked_at[place] = self._now
        if check_admissible(request, self.scheduler.limits) is None:
            self.scheduler.add(request)
        else:
            self.outcome.refused += 1
            self._go_on(place)

    def step(self) -> None:
        """Plan and commit one step; time passes."""
        scheduler, limits = self.scheduler, self.scheduler.limits
        plan = scheduler.schedule()
        for request, _ in plan.failures:
            self._end(request)
        if not plan.chunks:
            return
        step = describe_step(plan.chunks, limits.block_size)
        self._now += self._machine.seconds(plan.chunks, limits.costs)
        self.outcome.steps += 1
        for request in scheduler.commit(step, self._sample(plan.chunks)):
            self._end(request)

    def fast_forward(self) -> bool:
        """Take the steps before the next one in which anything happens, or somebody arrives, all at once.

        Returns:
            Whether there are any.
        """
        scheduler, running = self.scheduler, self.scheduler.queues.running
        most = uniform_steps(scheduler)
        if most < 1:
            return False
        count, arrival = 0, self.coming[0][0] if self.coming else math.inf
        for seconds in self._machine.decoding([one.computed_end for one in running], scheduler.limits.costs):
            if count == most or arrival <= self._now:
                break
            self._now += seconds
            count += 1
        self.outcome.steps += count
        fast_forward(scheduler, {one.request_id: self._next_tokens(one, count) for one in running})
        return True

    def _next_tokens(self, request: Request, count: int) -> Sequence[int]:
        known = request.generated_count
        return self._turns[request.request_id].answer[known : known + count]

    def _sample(self, chunks: Sequence[Chunk]) -> dict[int, int]:
        """What the trace says that comes next."""
        sampled = {}
        for chunk in chunks:
            if chunk.yields_token:
                place, count = chunk.request.request_id, chunk.request.generated_count
                sampled[place] = self._turns[place].answer[count]
                if count == 0:
                    self.outcome.ttft[place] = self._now - self._asked_at[place]
        return sampled

    def _end(self, request: Request) -> None:
        self.outcome.skipped[request.request_id] = request.skipped_prefill_tokens
        self._go_on(request.request_id)

    def _go_on(self, place: int) -> None:
        """The session's next turn comes when somebody has thought."""
        reply = self._replies.get(place)
        if reply is not None:
            heappush(self.coming, (self._now + self._turns[reply].time, reply))


def _replies(turns: Sequence[Turn]) -> dict[int, int]:
    """Which turn answers the end of which, by their places."""
    places = {id(turn): place for place, turn in enumerate(turns)}
    return {
        places[id(before)]: places[id(turn)]
        for session in by_session(turns).values()
        for before, turn in pairwise(session)
        if turn.is_reply
    }


@lru_cache(maxsize=4096)
def _params(answer: int, salt: str | None) -> RequestParams:
    return RequestParams(num_tokens_to_generate=answer, cache_salt=salt)
