"""Replay of a trace through the real scheduler and cache, with the trace's tokens in place of a model."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import cast

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.planner import check_admissible
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.sequence import Sequence as RequestSequence
from megatron_ext.scheduling.submission import Submission
from megatron_ext.simulation.disk import DiskSettings, SimulatedDisk
from megatron_ext.simulation.fast_forward import RestingDecodes
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.trace import Turn, by_session, common_tokens, packed


@dataclass
class Outcome:
    """Outcome of a replay; lists are by the position of a turn in the trace."""

    prompt: list[int]  # tokens
    skipped: list[int] = field(default_factory=list)
    ttft: list[float | None] = field(default_factory=list)  # simulated seconds; None if not served
    refused: int = 0  # exceeding the model's maximum or the pool
    steps: int = 0
    seconds: float = 0.0  # simulated
    statistics: EngineStatistics | None = None  # at the end

    @property
    def skipped_share(self) -> float:
        """Share of all prompt tokens that were skipped."""
        return sum(self.skipped) / max(1, sum(self.prompt))

    def ttft_percentile(self, percent: float) -> float:
        """Return a percentile of the time to first token in simulated seconds; 0 if nothing was served."""
        served = sorted(one for one in self.ttft if one is not None)
        return served[min(len(served) - 1, int(len(served) * percent / 100))] if served else 0.0


class Replay:
    """One run of a trace.

    Args:
        turns: Turns of all sessions.
        limits: Scheduler limits; their costs are the model's.
        policy: Eviction policy; None disables the cache.
        slots: Number of snapshot slots; None for a model without recurrent layers.
        machine: Cost model of a step.
        disk: Disk that takes what leaves memory; None without one.

    Attributes:
        turns: Turns of all sessions.
        machine: Cost model of a step.
        now: Simulated time, in seconds.
        coming: Heap of the known arrivals: time, and position in the trace.
        outcome: Outcome so far.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        limits: SchedulerLimits,
        policy: EvictionPolicyName | None,
        slots: int | None,
        machine: Machine | None = None,
        disk: DiskSettings | None = None,
    ) -> None:
        self.scheduler, self.limits = Scheduler(limits, policy, b"simulation", slots), limits
        self.resting = RestingDecodes(self.scheduler, self._next_tokens)
        self.outcome = Outcome([turn.prompt_length for turn in turns])
        self.outcome.skipped = [0] * len(turns)
        self.outcome.ttft = [None] * len(turns)
        self.turns, self.machine = turns, machine or Machine()
        self.now = 0.0
        self._disk = None if disk is None else SimulatedDisk(disk, self.scheduler, lambda: self.now, self.pass_time)
        self.coming: list[tuple[float, int]] = []
        self._replies, self._started = _replies(turns), _started(turns)
        self._before: dict[int, _Begun] = {}  # by the position of the reply
        self._asked_at: dict[int, float] = {}
        for place, turn in enumerate(turns):
            if not turn.is_reply and turn.beside is None:
                heappush(self.coming, (turn.time, place))

    def run(self) -> Outcome:
        """Run the whole trace."""
        queues, resting = self.scheduler.queues, self.resting
        while self.coming or len(queues):
            if not len(queues):
                self.now = max(self.now, self.coming[0][0])
            while self.coming and self.coming[0][0] <= self.now:
                self.submit(heappop(self.coming)[1])
            resting.wake(self.outcome.steps)
            if len(queues) > len(resting):
                self.step()
                self.rest()
            elif len(resting):
                self.leap()
        self.outcome.seconds = self.now
        self.outcome.statistics = self.statistics()
        return self.outcome

    def statistics(self) -> EngineStatistics:
        """Return the statistics in the form of an engine's."""
        found = EngineStatistics.of(self.scheduler, ended=len(self._asked_at), steps=self.outcome.steps)
        return found if self._disk is None else replace(found, disk=self._disk.use())

    def pass_time(self, moment: float) -> None:
        """Let time pass until a moment, or until a request arrives before it."""
        self.now = max(self.now, min([moment, *(arrival for arrival, _ in self.coming[:1])]))

    def submit(self, place: int) -> None:
        """Submit the turn at this position of the trace; sub-agents that it starts come at their distance from it."""
        self._asked_at[place] = self.now
        for started in self._started.get(place, ()):
            heappush(self.coming, (self.now + self.turns[started].time, started))
        if not self.take(place):
            self.outcome.refused += 1
            self._go_on(place)

    def take(self, place: int) -> bool:
        """Hand a turn to the scheduler, unless it can never be served; return whether it can."""
        request = self._request(place)
        is_admissible = check_admissible(request, self.limits) is None
        if is_admissible:
            self.scheduler.add(request)
        return is_admissible

    def _request(self, place: int) -> Request:
        """Build the request of a turn; what it has in common with the session's turn before is not hashed again."""
        turn, before = self.turns[place], self._before.pop(place, None)
        common = common_tokens(before.turn.prompt, turn.prompt) if before is not None else 0
        tokens = packed(turn.prompt, before.tokens if before is not None else array("I"), common)
        params = _params(len(turn.answer), turn.salt)
        submitted = cast("tuple[int, ...]", tokens)  # read by slices only
        arrival = len(self._asked_at) - 1
        request = Request(Submission(place, submitted, params, arrival, seed=0))
        if before is not None and before.sequence.chain is not None:
            request.sequence.chain = before.sequence.chain.fork(common)  # replaced if the salt is another
        reply = self._replies.get(place)
        if reply is not None:
            self._before[reply] = _Begun(turn, tokens, request.sequence)
        return request

    def step(self) -> None:
        """Schedule and commit one step, and advance the time."""
        scheduler, limits, loading = self.scheduler, self.limits, None if self._disk is None else self._disk.loading
        if loading is not None:
            loading.follow()
            loading.decide()
        plan = scheduler.schedule()
        for request, _ in plan.failures:
            self.end(request.request_id, request.skipped_prefill_tokens)
        if not plan.chunks and not len(self.resting):
            return
        step = scheduler.describe(plan)
        seconds = self.machine.seconds(plan.chunks, limits.costs, len(self.resting), self.resting.positions)
        self.now += seconds
        if loading is not None:
            loading.note_step(plan.chunks, seconds)
        self.outcome.steps += 1
        self.resting.leap(1)
        for request in scheduler.commit(step, self._sample(plan.chunks)):
            self.end(request.request_id, request.skipped_prefill_tokens)

    def rest(self) -> None:
        """Let requests rest that only decode in the next step."""
        self.resting.rest(self.outcome.steps)

    def leap(self) -> None:
        """Take all steps at once before a resting request wakes or another one arrives."""
        max_steps = self.resting.first_step - self.outcome.steps
        count, arrival = 0, self.coming[0][0] if self.coming else math.inf
        for seconds in self.machine.decoding(len(self.resting), self.resting.positions, self.limits.costs):
            if count == max_steps or arrival <= self.now:
                break
            self.now += seconds
            count += 1
        self.outcome.steps += count
        self.resting.leap(count)

    def _next_tokens(self, request: Request, count: int) -> Sequence[int]:
        known = request.generated_count
        return self.turns[request.request_id].answer[known : known + count]

    def _sample(self, chunks: Sequence[Chunk]) -> dict[int, int]:
        """Return the trace's next tokens for the chunks that yield one."""
        sampled = {}
        for chunk in chunks:
            if chunk.yields_token:
                place, count = chunk.request.request_id, chunk.request.generated_count
                sampled[place] = self.turns[place].answer[count]
                if count == 0:
                    self.outcome.ttft[place] = self.now - self._asked_at[place]
        return sampled

    def end(self, place: int, skipped: int) -> None:
        """Note that the turn at this position has ended and how many of its tokens were skipped."""
        self.outcome.skipped[place] = skipped
        self._go_on(place)

    def _go_on(self, place: int) -> None:
        """Schedule the arrival of the session's next turn, after its pause."""
        reply = self._replies.get(place)
        if reply is not None:
            heappush(self.coming, (self.now + self.turns[reply].time, reply))


@dataclass(frozen=True)
class _Begun:
    """Turn that was submitted, for its reply.

    Attributes:
        turn: The turn.
        tokens: Tokens of its prompt.
        sequence: Sequence, whose chain has the hashes of its blocks.
    """

    turn: Turn
    tokens: array[int]
    sequence: RequestSequence


def _started(turns: Sequence[Turn]) -> dict[int, list[int]]:
    """Return the positions of the sub-agents' first turns, by the position of the turn that starts them."""
    places = {id(turn): place for place, turn in enumerate(turns)}
    started: dict[int, list[int]] = {}
    for place, turn in enumerate(turns):
        if turn.beside is not None:
            started.setdefault(places[id(turn.beside)], []).append(place)
    return started


def _replies(turns: Sequence[Turn]) -> dict[int, int]:
    """Return the position of the reply to each turn, by the turn's position."""
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
