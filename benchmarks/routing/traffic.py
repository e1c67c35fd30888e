"""Sessions of chats and agents, tenants by Zipf. Everything is counted in units: blocks of 64 tokens, an id each."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

UNIT_TOKENS = 64
MAX_ANSWER = 4  # units


@dataclass
class Session:
    """Dialogue of one user.

    Attributes:
        start: Seconds from the beginning.
        salt: Cache salt of the tenant.
        context: Units at the beginning of the next prompt.
        turns: Units of the user's message, units of the answer, seconds until the next turn.
    """

    start: float
    salt: str
    context: array[int]
    turns: list[tuple[int, int, float]]


@dataclass
class Traffic:
    """Four sessions in five are chats, the others agents; a tenant has a system prompt, and tools for its agents."""

    seed: int = 0
    tenants: int = 1000
    zipf: float = 1.0
    _next: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._weights = list(accumulate((i + 1) ** -self.zipf for i in range(self.tenants)))
        self._openings: dict[tuple[int, bool], array[int]] = {}

    def fresh(self, count: int) -> array[int]:
        """Return unused ids."""
        self._next += count
        return array("I", range(self._next - count, self._next))

    def _between(self, low: int, high: int) -> int:
        """Longer ones are rarer."""
        return round(low * (high / low) ** self.random.random())

    def _opening(self, tenant: int, is_agent: bool) -> array[int]:
        key = tenant, is_agent
        if key not in self._openings:
            self._openings[key] = self.fresh(self._between(48, 96) if is_agent else self._between(4, 64))
        return self._openings[key]

    def session(self, start: float) -> Session:
        """The next one."""
        draw = self.random
        tenant = draw.choices(range(self.tenants), cum_weights=self._weights)[0]
        is_agent = draw.random() < 0.2
        context = self._opening(tenant, is_agent)[:]
        if is_agent:
            context += self.fresh(self._between(8, 64))  # a repository
            turns = [
                (self._between(1, 24), draw.randint(1, 3), draw.expovariate(1.0)) for _ in range(draw.randint(4, 20))
            ]
        else:
            count = 1 + min(15, int(draw.expovariate(0.25)))
            turns = [(self._between(1, 8), draw.randint(1, MAX_ANSWER), draw.expovariate(0.25)) for _ in range(count)]
        return Session(start, f"tenant {tenant}", context, turns)

    def sessions(self, rate: float, requests: int) -> Iterator[Session]:
        """`rate` begin in a second, until there are so many requests."""
        now, left = 0.0, requests
        while left > 0:
            now += self.random.expovariate(rate)
            session = self.session(now)
            del session.turns[left:]
            left -= len(session.turns)
            yield session


def units_of_a_session(seed: int = 1, sample: int = 3000) -> float:
    """Prompt units of a session, on average: what a fleet without caches computes for it."""
    traffic, total = Traffic(seed), 0
    for _ in range(sample):
        session = traffic.session(0.0)
        length = len(session.context)
        for said, answer, _ in session.turns:
            total += length + said
            length += said + answer
    return total / sample
