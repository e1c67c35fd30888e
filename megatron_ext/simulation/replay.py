"""Replay of a trace through the real scheduler and cache, with the trace's tokens in place of a model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import cast

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.config.costs import EntryCosts
from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.planner import reason_to_refuse
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.simulation.settings import Machine, Settings, limits_of
from megatron_ext.simulation.trace import Turn, common_tokens


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

    @property
    def lost_tokens(self) -> int:
        """Prompt tokens that were not skipped for want of memory."""
        assert self.statistics is not None, "the replay has come to its end"
        return self.statistics.counters.lost_slot_tokens + self.statistics.counters.lost_block_tokens

    def ttft_percentile(self, percent: float) -> float:
        """Return a percentile of the time to first token in simulated seconds; 0 if nothing was served."""
        served = sorted(one for one in self.ttft if one is not None)
        return served[min(len(served) - 1, int(len(served) * percent / 100))] if served else 0.0


def simulate(
    turns: Sequence[Turn],
    costs: EntryCosts,
    settings: Settings,
    machine: Machine | None = None,
    time_scale: float = 1.0,
) -> Outcome:
    """Play a trace to its end with these costs and settings; `time_scale` multiplies times between arrivals."""
    limits, slots = limits_of(costs, settings)
    return Replay(turns, limits, EvictionPolicyName(settings.policy), slots, machine, time_scale).run()


class Replay:
    """One run of a trace.

    Args:
        turns: Turns of all sessions.
        limits: Scheduler limits; their costs are the model's.
        policy: Eviction policy; None disables the cache.
        slots: Number of snapshot slots; None for a model without recurrent layers.
        machine: Cost model of a step.
        time_scale: Factor of all times between arrivals; below 1, requests come faster.

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
        time_scale: float = 1.0,
    ) -> None:
        self.scheduler, self.limits = Scheduler(limits, policy, b"simulation", slots), limits
        self.outcome = Outcome([turn.prompt_length for turn in turns])
        self.outcome.skipped = [0] * len(turns)
        self.outcome.ttft = [None] * len(turns)
        self.turns, self.machine = turns, machine or Machine()
        self.now, self._time_scale = 0.0, time_scale
        self.coming: list[tuple[float, int]] = []
        self._replies: dict[int, int] = {}  # positions, by the position of the turn before
        self._started: dict[int, list[int]] = {}  # sub-agents' first turns, by the position of the one beside
        self._before: dict[int, tuple[Turn, Request]] = {}  # by the position of the reply
        self._asked_at: dict[int, float] = {}
        places = {id(turn): place for place, turn in enumerate(turns)}
        last: dict[int, int] = {}  # positions, by session
        for place, turn in enumerate(turns):
            if turn.is_reply:
                self._replies[last[turn.session]] = place
            elif turn.beside is not None:
                self._started.setdefault(places[id(turn.beside)], []).append(place)
            else:
                self._expect(place, 0.0)
            last[turn.session] = place

    def run(self) -> Outcome:
        """Run the whole trace."""
        queues = self.scheduler.queues
        while self.coming or len(queues):
            if not len(queues):
                self.now = max(self.now, self.coming[0][0])
            while self.coming and self.coming[0][0] <= self.now:
                self.submit(heappop(self.coming)[1])
            if len(queues):
                self.step()
        self.outcome.seconds = self.now
        self.outcome.statistics = self.statistics()
        return self.outcome

    def statistics(self) -> EngineStatistics:
        """Return the statistics in the form of an engine's."""
        return EngineStatistics.of([(self.scheduler, None)], ended=len(self._asked_at), steps=self.outcome.steps)

    def submit(self, place: int) -> None:
        """Submit the turn at this position of the trace; sub-agents that it starts come at their distance from it."""
        self._asked_at[place] = self.now
        for started in self._started.get(place, ()):
            self._expect(started, self.now)
        if not self.take(place):
            self.outcome.refused += 1
            self._go_on(place)

    def take(self, place: int) -> bool:
        """Hand a turn to the scheduler, unless it can never be served; return whether it can."""
        request = self._request(place)
        is_admissible = reason_to_refuse(request, self.limits) is None
        if is_admissible:
            self.scheduler.add(request)
        return is_admissible

    def _request(self, place: int) -> Request:
        """Build the request of a turn; tokens in common with the session's previous turn are not hashed again."""
        turn, tokens = self.turns[place], array("I")
        for piece in turn.prompt:
            tokens.extend(piece)
        submitted = cast("tuple[int, ...]", tokens)  # read by slices only
        params = RequestParams(num_tokens_to_generate=len(turn.answer), cache_salt=turn.salt)
        request = Request(place, RequestInputs(submitted, params), arrival=len(self._asked_at) - 1, seed=0)
        if place in self._before:
            before, earlier = self._before.pop(place)
            if earlier.chain is not None:  # another salt replaces it
                request.chain = earlier.chain.fork(common_tokens(before.prompt, turn.prompt))
        if place in self._replies:
            self._before[self._replies[place]] = turn, request
        return request

    def step(self) -> None:
        """Schedule and commit one step, and advance the time."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        if not plan.chunks:
            return
        step = scheduler.describe(plan)
        self.now += self.machine.seconds(plan.chunks, self.limits.costs)
        self.outcome.steps += 1
        for request in scheduler.commit(step, self._sample(plan.chunks)):
            self.end(request.request_id, request.ledger.skipped)

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
            self._expect(reply, self.now)

    def _expect(self, place: int, since: float) -> None:
        heappush(self.coming, (since + self.turns[place].time * self._time_scale, place))
