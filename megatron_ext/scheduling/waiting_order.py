"""Order of admission of waiting requests: `fcfs`, by arrival, or `lpm`, the longest cached prefix first.

Under `lpm` requests that were admitted before come first, by arrival; then those with the most tokens that cached
entries let them skip, as far as that is known (`PrefixRanking`), ties by arrival. A request overtakes earlier ones only
within their budgets (`OvertakeBudgets`).
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator, Sequence

from megatron_ext.scheduling.overtaking import OvertakeBudgets, Work
from megatron_ext.scheduling.request import Request

Key = tuple[bool, int, int]  # the lower goes first


class WaitingOrder:
    """Order of waiting requests, and the awake ones in that order.

    Args:
        overtake_tokens: Overtake budget of each request under `lpm`; None for `fcfs`.

    Attributes:
        awake: Awake requests in order.
        keys: Sort keys of all waiting requests.
        budgets: Overtake budgets; None for `fcfs`.
    """

    def __init__(self, overtake_tokens: int | None = None) -> None:
        self.awake: list[Request] = []
        self.keys: dict[Request, Key] = {}
        self.budgets = None if overtake_tokens is None else OvertakeBudgets(overtake_tokens)

    def add(self, request: Request) -> None:
        """Add an awake request; audits, and requests admitted before, cannot be overtaken."""
        key = self.keys[request] = self._key(request)
        bisect.insort(self.awake, request, key=self.keys.__getitem__)
        if self.budgets is not None and key[0] and request.audit is None:
            self.budgets.enter(request)

    def remove(self, request: Request, *, is_awake: bool) -> None:
        """Remove a request."""
        if is_awake:
            self._take_out(request)
        if self.budgets is not None and request in self.budgets:
            self.budgets.leave(request)
        del self.keys[request]

    def sleep(self, request: Request) -> None:
        """Take out an awake request, which waits for a prefix."""
        self._take_out(request)
        if self.budgets is not None and request in self.budgets:
            self.budgets.suspend(request)

    def wake(self, requests: Sequence[Request]) -> None:
        """Put sleeping requests back."""
        if len(requests) == 1:
            bisect.insort(self.awake, requests[0], key=self.keys.__getitem__)
        elif requests:
            self.awake += requests
            self.awake.sort(key=self.keys.__getitem__)  # merges runs that are already in order
        if self.budgets is not None:
            for request in filter(self.budgets.__contains__, requests):
                self.budgets.resume(request)

    def rank(self, request: Request, skipped: int) -> None:
        """Put an awake request at its place by the tokens that it can skip."""
        key = self._key(request, skipped)
        if key != self.keys[request]:
            self._take_out(request)
            self.keys[request] = key
            bisect.insort(self.awake, request, key=self.keys.__getitem__)

    def forget_ranks(self) -> None:
        """Rank all requests by arrival, since nothing is cached any more."""
        self.keys = {request: self._key(request) for request in self.keys}
        self.awake.sort(key=self.keys.__getitem__)

    def _key(self, request: Request, skipped: int = 0) -> Key:
        if self.budgets is None:
            return False, 0, request.arrival
        was_admitted = request.ledger.matched_blocks is not None
        return not was_admitted, 0 if was_admitted else -skipped, request.arrival

    def _take_out(self, request: Request) -> None:
        first = bisect.bisect_left(self.awake, self.keys[request], key=self.keys.__getitem__)
        del self.awake[self.awake.index(request, first)]

    def check(self, members: Iterable[Request]) -> None:
        """Assert that awake requests are in order, and that each waiting request has a key."""
        keys = [self.keys[request] for request in self.awake]
        assert keys == sorted(keys), f"out of order: {keys}"
        assert self.keys.keys() == set(members), "keys of other requests than the waiting ones"
        if self.budgets is not None:
            self.budgets.check()


class Line:
    """Iterator over awake requests, and over sleepers that join during a plan, in the order of their turns.

    The plan reports each admission and each wait to it.
    """

    def __init__(self, order: WaitingOrder) -> None:
        self._order, self._budgets = order, order.budgets
        self._next = 0
        self._place: Key = (False, 0, 0)  # of the last request in order
        self._joined: list[tuple[Key, int, Request]] = []  # a heap
        self._known: set[Request] = set()
        self._first: Request | None = None  # has the next turn
        self._early: set[Request] = set()  # had their turn before it came
        self._left: set[Request] = set()  # admitted, or waiting for something other than their turn
        self._admitted: list[Work] = []

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if self._first is not None:
            request, self._first = self._first, None
            return request
        while (request := self._next_in_order()) in self._early:
            pass
        self._place = self._order.keys[request]
        return request

    def _next_in_order(self) -> Request:
        awake = self._order.awake
        first = awake[self._next] if self._next < len(awake) else None
        if self._joined and (first is None or self._joined[0][0] < self._order.keys[first]):
            return heapq.heappop(self._joined)[2]
        if first is None:
            raise StopIteration
        self._next += 1
        return first

    def join(self, requests: Iterable[Request], *, only_later: bool = False) -> None:
        """Add sleepers at their places; if `only_later`, without those before the last request in order."""
        keys = self._order.keys
        for request in requests:
            has_had_its_turn = only_later and keys[request] < self._place
            if not has_had_its_turn and request not in self._known:
                self._known.add(request)
                self._put(request)

    def _put(self, request: Request) -> None:
        heapq.heappush(self._joined, (self._order.keys[request], request.request_id, request))

    def overtakes(self, request: Request) -> bool:
        """Return whether the admission of `request` overtakes an earlier one."""
        return self._budgets is not None and next(self._budgets.earlier(request, self._left), None) is not None

    def may_pass(self, request: Request, work: int) -> bool:
        """Return whether the budgets of earlier requests allow `request`, which has so much work, to be admitted.

        If not, the earliest of them has its turn first, and then `request` has another one.
        """
        if self._budgets is None or self._budgets.allow(request, work, self._left, self._admitted):
            return True
        first = next(self._budgets.earlier(request, self._left))
        if first not in self._early:
            self._first = first
            self._early.add(first)
            self._put(request)
        return False

    def hold(self, request: Request) -> None:
        """Note that `request` waits for something other than its turn, so that it is not overtaken."""
        self._left.add(request)

    def admit(self, request: Request, work: int) -> None:
        """Note that `request` is admitted."""
        self._left.add(request)
        self._admitted.append((request, work))
