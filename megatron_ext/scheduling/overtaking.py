"""Overtake budgets: how much work of later requests each waiting request lets pass.

    arrival    3         5         6         8         9          admitted before them: 4 (100 tokens), 7 (50 tokens)
    charged    150       50        50        asleep    0          request 9 of 60 tokens would charge 3, 5 and 6

A request is charged the work of all admitted requests that arrived after it, less the work admitted while it waited for
something other than its turn. Without such waits, the earlier one of two requests is charged at least as much as the
later one, so a check ends at the first request that has had none.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

from megatron_ext.scheduling.request import Request

_ARRIVAL = attrgetter("arrival")
Work = tuple[Request, int]  # admitted request, and the tokens that it computes until it ends


class OvertakeBudgets:
    """Tokens charged to waiting requests by requests that overtook them.

    Members are requests that wait for their first admission. They enter in order of arrival.

    Args:
        tokens: Maximum charge of a request.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._competing: list[Request] = []  # members that can be overtaken, by arrival
        self._exempt: dict[Request, int] = {}  # by member: work of later requests that is not charged
        self._asleep: dict[Request, int] = {}  # members that cannot be overtaken, with their charges
        self._arrivals: list[int] = []  # of admitted requests that arrived after the oldest member, sorted
        self._works: list[int] = []  # their work

    def __contains__(self, request: Request) -> bool:
        return request in self._exempt

    def enter(self, request: Request) -> None:
        """Let a new request compete."""
        self._asleep[request] = 0
        self.resume(request)

    def leave(self, request: Request) -> None:
        """Forget a member."""
        if self._asleep.pop(request, None) is None:
            del self._competing[self._place(request)]
        del self._exempt[request]

    def suspend(self, request: Request) -> None:
        """Let a competing request be neither charged nor an obstacle until `resume`."""
        self._asleep[request] = self.charged(request)
        del self._competing[self._place(request)]

    def resume(self, request: Request) -> None:
        """Let a suspended request compete again."""
        self._exempt[request] = self._later_work(request) - self._asleep.pop(request)
        bisect.insort(self._competing, request, key=_ARRIVAL)

    def charged(self, request: Request) -> int:
        """Return the tokens charged to a competing request."""
        return self._later_work(request) - self._exempt[request]

    def earlier(self, request: Request, left: Collection[Request]) -> Iterator[Request]:
        """Iterate over the requests that a member would overtake, by arrival, without `left`."""
        for one in self._competing if request in self else ():
            if one.arrival >= request.arrival:
                return
            if one not in left:
                yield one

    def allow(self, request: Request, work: int, left: Collection[Request], admitted: Iterable[Work]) -> bool:
        """Return whether no budget forbids that a request of so much work overtakes.

        Args:
            request: Waiting request.
            work: Tokens that it computes until it ends.
            left: Requests that are not overtaken any more.
            admitted: Admissions to be charged before.
        """
        for one in self.earlier(request, left):
            before = sum(tokens for other, tokens in admitted if other.arrival > one.arrival and other in self)
            if self.charged(one) + before + work > self.tokens:
                return False
            if not self._exempt[one]:
                break
        return True

    def charge(self, admitted: Iterable[Work], exempt: Iterable[Request]) -> int:
        """Charge admissions, which are applied, to the requests that they overtake.

        Args:
            admitted: Admissions in their order.
            exempt: Requests that wait for something other than their turn, and are not overtaken.

        Returns:
            Number of requests that overtook others.
        """
        left, overtakers = {*exempt}, 0
        exempt = [request for request in left if request in self]
        for request, work in admitted:
            if request in self:
                overtakers += next(self.earlier(request, left), None) is not None
                place = bisect.bisect(self._arrivals, request.arrival)
                self._arrivals.insert(place, request.arrival)
                self._works.insert(place, work)
                for one in exempt:
                    self._exempt[one] += work if one.arrival < request.arrival else 0
            left.add(request)
        if self._exempt:
            needless = bisect.bisect(self._arrivals, next(iter(self._exempt)).arrival)
            del self._arrivals[:needless], self._works[:needless]
        return overtakers

    def _later_work(self, request: Request) -> int:
        return sum(self._works[bisect.bisect(self._arrivals, request.arrival) :])

    def _place(self, request: Request) -> int:
        return bisect.bisect_left(self._competing, request.arrival, key=_ARRIVAL)

    def check(self) -> None:
        """Assert that no request is charged more than its budget, and that each member competes or is suspended."""
        assert {*self._competing, *self._asleep} == self._exempt.keys(), "other members than requests that wait"
        charges = [*map(self.charged, self._competing), *self._asleep.values()]
        assert all(0 <= charge <= self.tokens for charge in charges), f"charges beyond the budget: {charges}"
        assert min(self._exempt.values(), default=0) >= 0, "more is exempt than was admitted"
        assert self._competing == sorted(self._competing, key=_ARRIVAL), "out of order"
