"""Simulated time: sessions ask, a balancer chooses, replicas compute, some of them die."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from benchmarks.routing.balancers import Balancer
from benchmarks.routing.replica import DECODE, OVERHEAD, PREFILL, Request, SimulatedReplica
from benchmarks.routing.traffic import Session, Traffic, units_of_a_session
from megatron_ext.routing.prompt import Prompt, chained_keys

DOWN = 20.0  # seconds that a replica is away


@dataclass(frozen=True)
class Scale:
    """Size of the simulation.

    Attributes:
        replicas: Replicas of the fleet.
        requests: Total number of requests.
        capacity: Blocks of a replica's cache.
        offered: Prompt tokens that arrive, relative to what the fleet could compute if nothing were cached.
        failures: Share of the replicas that die, at times spread over the run.
        seed: Seed of all random numbers.
    """

    replicas: int
    requests: int
    capacity: int = 4000
    offered: float = 1.5
    failures: float = 0.0625
    seed: int = 0


@dataclass
class Outcome:
    """Results of a simulation; times in simulated seconds."""

    prompt_units: int = 0
    skipped_units: int = 0
    waits: list[float] = field(default_factory=list)  # until computing began
    firsts: list[float] = field(default_factory=list)  # until the first token
    computed: list[int] = field(default_factory=list)  # units, by replica
    retried: int = 0
    seconds: float = 0.0  # simulated
    choosing: float = 0.0  # seconds of CPU in decisions
    all_told: float = 0.0  # seconds of CPU in everything that the balancer is told, decisions too

    @property
    def skipped(self) -> float:
        """Share of the prompt tokens."""
        return self.skipped_units / self.prompt_units

    @property
    def imbalance(self) -> float:
        """The most that a replica computed over the mean."""
        return max(self.computed) * len(self.computed) / sum(self.computed)


class World:
    """Simulation run of one fleet."""

    def __init__(self, scale: Scale, balancer: Balancer) -> None:
        self.scale, self.balancer = scale, balancer
        self.replicas = [SimulatedReplica(i, scale.capacity) for i in range(scale.replicas)]
        self.outcome = Outcome()
        self.served: list[tuple[float, int]] = []  # starts of sessions, and turns of theirs that came to their ends
        self.traffic = Traffic(scale.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._order = itertools.count()
        self._now = 0.0
        rate = scale.offered * scale.replicas * PREFILL / units_of_a_session()
        self._sessions = self.sessions(rate)
        self._next_session()
        self._plan_failures(rate)

    def sessions(self, rate: float) -> Iterator[Session]:
        """Yield the sessions by start, at a rate in sessions a second."""
        return self.traffic.sessions(rate, self.scale.requests)

    def _plan_failures(self, rate: float) -> None:
        count = round(self.scale.failures * self.scale.replicas)
        length = self.scale.requests / 5 / rate  # a session has about 5 requests
        for i in range(count):
            dying = self.traffic.random.randrange(self.scale.replicas)
            self._at(length * (i + 0.5) / count, self._fail, self.replicas[dying])

    def _at(self, moment: float, what: Callable[..., None], *arguments: object) -> None:
        heappush(self._events, (moment, next(self._order), what, arguments))

    def run(self) -> Outcome:
        """Run the simulation to its end."""
        while self._events:
            self._now, _, what, arguments = heappop(self._events)
            what(*arguments)
        self.outcome.seconds = self._now
        self.outcome.computed = [replica.computed for replica in self.replicas]
        return self.outcome

    def _tell(self, what: Callable, *arguments: object) -> object:
        began = time.thread_time()
        answer = what(*arguments)
        self.outcome.all_told += time.thread_time() - began
        return answer

    # Requests

    def _next_session(self) -> None:
        session = next(self._sessions, None)
        if session is not None:
            self._at(session.start, self._begin_session, session)

    def _begin_session(self, session) -> None:
        self._next_session()
        self._ask(session, 0)

    def _ask(self, session, turn: int) -> None:
        said, answer, _ = session.turns[turn]
        units = session.context + self.traffic.fresh(said)
        request = Request(session, turn, self._now, units, (), self.traffic.fresh(answer), ())
        self._send(request)

    def _send(self, request: Request) -> None:
        balancer = self.balancer
        began = time.thread_time()
        prompt = Prompt(request.units, request.session.salt)
        chosen = balancer.choose(prompt)
        decided = time.thread_time()
        balancer.began(request, chosen, prompt)
        self.outcome.choosing += decided - began
        self.outcome.all_told += time.thread_time() - began
        request.keys = prompt.keys(1)
        request.more_keys = chained_keys(request.keys[-1], request.answer, 1)
        replica = self.replicas[chosen]
        replica.waiting.append(request)
        replica.present.add(request)
        self._go_on(replica)

    def _go_on(self, replica: SimulatedReplica) -> None:
        begun = replica.begin()
        if begun is None:
            return
        request, gone = begun
        if gone:
            self._tell(self.balancer.removed, replica.number, gone)
        self.outcome.waits.append(self._now - request.asked)
        computing = (len(request.keys) - request.skipped) / PREFILL + OVERHEAD
        self._at(self._now + computing, self._first_token, replica, replica.life, request)

    def _first_token(self, replica: SimulatedReplica, life: int, request: Request) -> None:
        if life != replica.life:
            return
        out = self.outcome
        out.prompt_units += len(request.keys)
        out.skipped_units += request.skipped
        out.firsts.append(self._now - request.asked)
        there = request.matched
        self._publish(replica, request, request.keys[there:], request.units[there:], there)
        self._tell(self.balancer.prefilled, request)
        replica.is_computing = False
        self._at(self._now + len(request.answer) * DECODE, self._end, replica, life, request)
        self._go_on(replica)

    def _publish(self, replica: SimulatedReplica, request: Request, keys, ids, before: int) -> None:
        known = replica.publish(keys)
        if known < len(keys):
            place = before + known
            whole = (*request.keys, *request.more_keys)
            parent = whole[place - 1] if place else None
            self._tell(self.balancer.stored, replica.number, keys[known:], parent, ids[known:], request.session.salt)

    def _end(self, replica: SimulatedReplica, life: int, request: Request) -> None:
        if life != replica.life:
            return
        self._publish(replica, request, request.more_keys, request.answer, len(request.keys))
        replica.release(request)
        self.served.append((request.session.start, request.turn))
        self._tell(self.balancer.ended, request, len(request.answer))
        session = request.session
        session.context = request.units + request.answer
        if request.turn + 1 < len(session.turns):
            self._at(self._now + session.turns[request.turn][2], self._ask, session, request.turn + 1)
        self._go_on(replica)

    # Failures

    def _fail(self, replica: SimulatedReplica) -> None:
        if not replica.is_up:
            return
        lost = replica.die()
        self._tell(self.balancer.left, replica.number, lost)
        self._at(self._now + DOWN, self._come_back, replica)
        for request in lost:
            self.outcome.retried += 1
            self._send(Request(request.session, request.turn, request.asked, request.units, (), request.answer, ()))

    def _come_back(self, replica: SimulatedReplica) -> None:
        replica.is_up = True
        self._tell(self.balancer.joined, replica.number)
