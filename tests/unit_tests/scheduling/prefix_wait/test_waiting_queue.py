"""Waiting queue: requests looked at, sleeping requests, and times of hashing; blocks of 4 tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling import block_hasher, planner
from megatron_ext.scheduling.prefix_wait.waiting_queue import WaitingQueue
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.waiting_order import WaitingOrder
from tests.unit_tests.scheduling.builders import add, asleep, make_limits, make_request, request_of, step

LRU = EvictionPolicyName.LRU
SHARED = [*range(24)]


def make_scheduler(**limits: object) -> Scheduler:
    return Scheduler(make_limits(**{"total_blocks": 40, "max_tokens": 8} | limits), LRU)


def led(count: int, **limits: object) -> Scheduler:
    """Queue with so many followers of one leader of 25 tokens, 8 a step."""
    scheduler = make_scheduler(**limits)
    add(scheduler, *(request_of(arrival, [*SHARED, 100 + arrival]) for arrival in range(count + 1)))
    return scheduler


def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the waiting requests that are matched, as it happens; the list fills while the scheduler works."""
    seen = []
    may_wait_for_prefix = planner.may_wait_for_prefix
    monkeypatch.setattr(
        planner,
        "may_wait_for_prefix",
        lambda request, *args: (seen.append(request.request_id), may_wait_for_prefix(request, *args))[1],
    )
    return seen


class TestWhoIsLookedAt:
    """Planning time of a step does not grow with requests that cannot be admitted anyway."""

    def test_followers_are_looked_at_once_and_when_their_prefix_is_cached(self, monkeypatch):
        """KV-6: followers are not looked at in the steps between, and then only as far as there is room."""
        seen = looks(monkeypatch)
        scheduler = led(200, max_requests=3)
        step(scheduler)
        assert sorted(set(seen)) == list(range(201))
        assert len(asleep(scheduler)) == 200
        seen.clear()
        step(scheduler)
        assert seen == []
        step(scheduler)  # the last of what they share
        assert (seen, asleep(scheduler)) == ([], {})
        step(scheduler)
        assert seen == [1, 2, 3]  # the third finds no slot

    def test_with_a_full_batch_the_first_of_the_line_only(self, monkeypatch):
        """KV-6: all others are after it in the queue."""
        scheduler = make_scheduler(max_requests=1, max_tokens=64)
        add(scheduler, *(request_of(arrival, range(100 * arrival, 100 * arrival + 9)) for arrival in range(50)))
        step(scheduler)
        seen = looks(monkeypatch)
        step(scheduler)
        assert seen == [1]

    def test_a_long_cached_prompt_that_must_wait_costs_a_few_look_ups(self):
        """KV-2: the look-ups do not grow with its blocks."""
        scheduler = Scheduler(
            make_limits(total_blocks=600, max_tokens=2048, max_sequence_length=4096, max_requests=1), LRU
        )
        first = request_of(0, range(2000))
        add(scheduler, first)
        step(scheduler)
        scheduler.end(first, Outcome(Status.COMPLETED))
        add(scheduler, request_of(1, [7]), request_of(2, range(2000)))
        step(scheduler)
        index = scheduler.cache.index
        entries = index._blocks = CountingDict(index._blocks)
        assert scheduler.schedule().deferrals[-1].request.request_id == 2
        assert 0 < entries.count < 40  # of 500 blocks


class CountingDict(dict):
    """Dict that counts look-ups."""

    count = 0

    def __contains__(self, key: object) -> bool:
        self.count += 1
        return super().__contains__(key)

    def __getitem__(self, key: object) -> object:
        self.count += 1
        return super().__getitem__(key)


class TestHashing:
    """KV-1: hashing on arrival and in slices, so that no step hashes every newcomer."""

    @pytest.fixture(autouse=True)
    def small_slices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(block_hasher, "HASH_SLICE", 8)
        monkeypatch.setattr(planner, "HASH_SLICE", 8)

    def test_the_rest_in_slices_in_order_of_arrival(self):
        """The first in the queue takes the first slices, since it needs its hashes."""
        scheduler = make_scheduler(max_requests=1, max_tokens=64)
        requests = [make_request(arrival, 24) for arrival in range(4)]
        add(scheduler, *requests)
        left = [[request.unhashed_tokens for request in requests[1:]]]
        for _ in range(4):
            step(scheduler)
            left.append([request.unhashed_tokens for request in requests[1:]])
        assert left == [[16, 16, 16], [16, 16, 16], [0, 16, 16], [0, 8, 16], [0, 0, 16]]

    def test_nothing_is_kept_of_ended_requests(self):
        scheduler = make_scheduler(max_requests=1)
        requests = [make_request(arrival, 40) for arrival in range(6)]
        add(scheduler, *requests)
        for request in requests:
            scheduler.end(request, Outcome(Status.ABORTED))
        scheduler.schedule()
        assert not scheduler._hashing._unfinished


def lose_a_sleeper(queue: WaitingQueue) -> None:
    queue._sleepers.clear()


def sleep_and_wake(queue: WaitingQueue) -> None:
    queue.order.awake.append(next(queue.sleepers())[0])


def lose_a_request(queue: WaitingQueue) -> None:
    queue.order.awake.clear()


def mix_the_line(queue: WaitingQueue) -> None:
    queue.order.awake.reverse()


def keep_an_unwanted_block(queue: WaitingQueue) -> None:
    queue._pins.want(b"unwanted")


def follow_another(queue: WaitingQueue) -> None:
    queue._followers[77] = queue._followers.pop(1)


@pytest.mark.parametrize(
    "damage", [lose_a_sleeper, sleep_and_wake, lose_a_request, mix_the_line, keep_an_unwanted_block, follow_another]
)
def test_check_finds(damage: Callable[[WaitingQueue], None]):
    """Negative controls of the queue's own check."""
    queue = WaitingQueue(PrefixCache(4, LRU), WaitingOrder())
    requests = [make_request(arrival, 8) for arrival in range(4)]
    for request in requests:
        queue.add(request)
    queue.sleep(requests[3], 1, b"digest", 2)
    queue.check()
    damage(queue)
    with pytest.raises(AssertionError):
        queue.check()


def test_a_sleeper_that_concerns_several_plans_has_one_turn():
    """KV-6: its turn is in its place, not one per leader that it may now follow; earlier ones had theirs."""
    queue = WaitingQueue(PrefixCache(4, LRU), WaitingOrder())
    requests = [request_of(arrival, [arrival]) for arrival in range(6)]
    for request in requests:
        queue.add(request)
    for request in (requests[1], requests[2], requests[4], requests[5]):
        queue.sleep(request, 77, BlockHash(b"hash"), 1)
    line = queue.line()
    assert next(line) is requests[0]
    line.join([requests[4], requests[2]], only_later=True)
    line.join([requests[2], requests[5], requests[4]], only_later=True)
    assert next(line) is requests[2]
    line.join([requests[1], requests[2]], only_later=True)
    assert list(line) == [requests[3], requests[4], requests[5]]


def test_sleepers_join_behind_a_request_that_is_put_forward():
    """SC-5: an overtaker is refused, and the earliest request goes first; sleepers between them still have a turn."""
    queue = WaitingQueue(PrefixCache(4, LRU), WaitingOrder(10))
    requests = [request_of(arrival, [arrival]) for arrival in range(3)]
    for request, skipped in zip(requests, (0, 16, 32), strict=True):
        queue.add(request)
        queue.order.rank(request, skipped)
    queue.sleep(requests[1], 77, BlockHash(b"hash"), 1)
    line = queue.line()
    assert next(line) is requests[2]
    assert not line.may_pass(requests[2], 11)
    assert next(line) is requests[0]
    line.join([requests[1]], only_later=True)
    assert list(line) == [requests[2], requests[1]]
