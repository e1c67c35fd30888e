"""Loads from disk as the scheduler sees them: what they take, give back, and leave for requests to find (EX-11)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.disk_loads import BeginLoad, EndLoad, LoadCommand
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import (
    add,
    admitted,
    cache_blocks_with_snapshots,
    make_limits,
    request_of,
    step,
)

X = BlockHash(b"x" * 32)


def make(slabs: SlabLayout | None = None, slots: int | None = None, blocks: int = 8) -> Scheduler:
    limits = make_limits(slabs=slabs, total_blocks=blocks if slabs is None else slabs.blocks, max_tokens=32)
    return Scheduler(limits, EvictionPolicyName.LRU, b"model", slots)


def begin(scheduler: Scheduler, blocks: int, *, cached: int = 0, arrival: int = 9) -> Request:
    """A waiting request whose first blocks are loaded, as load 1; so many of them are cached."""
    request = request_of(arrival, range(4 * blocks + 1), num_tokens_to_generate=1)
    add(scheduler, request)
    cache = scheduler.cache
    if cached:
        cache.release(cache.publish(request.block_hashes[:cached], cache.allocate(cached), None))
    has_snapshot = cache.states is not None
    assert scheduler.disk_loads.begin(1, request, blocks, has_snapshot=has_snapshot) == cached
    return request


@pytest.mark.parametrize("is_paused", [False, True])
def test_requests_follow_blocks_that_a_load_moves(is_paused):
    """HY-5: a request that kept the old places would read the load's contents; a paused one goes on later."""
    scheduler = make(SlabLayout(3, 3))
    requests = [request_of(arrival, range(50 * arrival, 50 * arrival + 3)) for arrival in range(1, 5)]
    add(scheduler, *requests)
    step(scheduler)
    for request in requests[1:3]:
        scheduler.end(request, Outcome(Status.ABORTED))
    if is_paused:
        scheduler.queues.move(requests[3], scheduler.queues.paused)
    assert scheduler.cache.states.reserve(X) is not None  # the last free slab
    begin(scheduler, 1)
    places = scheduler.disk_loads.reserve(1)
    assert (requests[0].block_table, requests[3].block_table) == ((0,), (2,))
    assert scheduler.cache.changes.block_copies == ((3, 2),)
    assert places.blocks == (1,)


def test_blocks_before_a_load_may_move():
    """HY-5: they are looked for where they lie now, and are free again once the load is given up."""
    scheduler = make(SlabLayout(3, 4))
    cache = scheduler.cache
    begin(scheduler, 2, cached=1)
    others = cache.allocate(5)
    cache.release(others[:3])
    assert cache.states.reserve(X) is not None
    places = scheduler.disk_loads.reserve(1)
    assert (places.shared, places.blocks) == ((6,), (7,))
    scheduler.disk_loads.give_back(places)
    cache.states.cancel(X)
    cache.release(others[3:])
    scheduler.check()
    assert cache.available_count == 12


@pytest.mark.parametrize("cached", [0, 1])
def test_a_load_that_finds_no_slot_or_no_blocks_besides_keeps_nothing(cached):
    """Blocks that stay pinned are lost until the process ends, and so is a slot that stays reserved."""
    scheduler = make(SlabLayout(1, 2))
    begin(scheduler, 2, cached=cached)
    assert scheduler.disk_loads.reserve(1) is None
    scheduler.check()
    assert scheduler.cache.available_count == 2


def test_a_load_without_a_slot_takes_no_blocks_first():
    """What is cached would be evicted for nothing."""
    scheduler = make(slots=0)
    begin(scheduler, 2)
    assert scheduler.disk_loads.reserve(1) is None
    assert scheduler.cache.states.skipped == 0


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_load_leaves_snapshots_alone_only_while_requests_run(is_idle):
    """HY-5: an idle engine would wait until the load's time is over."""
    scheduler = make(SlabLayout(8, 2))
    cache = scheduler.cache
    cache_blocks_with_snapshots(cache, 2)
    if not is_idle:
        add(scheduler, request_of(0, range(90, 93), num_tokens_to_generate=2))
        step(scheduler)
    begin(scheduler, 13)
    assert (scheduler.disk_loads.reserve(1) is not None) == is_idle


def test_a_snapshot_that_is_being_taken_is_not_loaded():
    scheduler = make(slots=2)
    request = begin(scheduler, 1)
    assert scheduler.cache.states.reserve(request.block_hashes[0]) is not None
    assert scheduler.disk_loads.reserve(1).slot is None


class Runs:
    """Observer that keeps the runs of blocks that are stored."""

    def __init__(self) -> None:
        self.runs: list[PublishedRun] = []

    def on_blocks_stored(self, run: PublishedRun) -> None:
        self.runs.append(run)

    def on_snapshot_stored(self, block_hash: BlockHash) -> None: ...


def test_what_is_loaded_continues_what_is_cached():
    """Observers get all of it, an eviction finds its parent, and the request resumes after it."""
    scheduler = make(SlabLayout(4, 2))
    request = begin(scheduler, 3, cached=1)
    scheduler.cache.observers = [observer := Runs()]
    assert scheduler.disk_loads.publish(scheduler.disk_loads.reserve(1)) == 1
    first, second, third = request.block_hashes[:3]
    assert [(one.block_hashes, one.parent, one.end) for one in observer.runs] == [((second, third), first, 12)]
    assert scheduler.cache.index.parent_hash(second) == first
    assert scheduler.cache.shared_memory._next_snapshot() > scheduler.cache.unused.next_priority(), (
        "used as lately as blocks"
    )
    scheduler.cache.observers = []
    plan = step(scheduler)
    assert admitted(plan) == [(9, 3, 1)]
    assert plan.admissions[0].chunk.start == 12


def test_a_request_that_sleeps_for_states_is_woken_by_their_load():
    """Its blocks are cached already, so that nothing else wakes it."""
    scheduler = make(slots=2)
    request = begin(scheduler, 1, cached=1)
    scheduler.queues.waiting.sleep(request, 77, request.block_hashes[0], 1)
    scheduler.disk_loads.publish(scheduler.disk_loads.reserve(1))
    assert not scheduler.queues.waiting.is_asleep(request)


def test_a_load_is_useful_as_long_as_one_request_waits():
    scheduler = make()
    requests = [begin(scheduler, 2), request_of(10, range(9))]
    add(scheduler, requests[1])
    scheduler.disk_loads.note(scheduler.schedule().deferrals)
    for request in requests:
        assert not scheduler.disk_loads.is_useless(1)
        scheduler.end(request, Outcome(Status.ABORTED))
    assert scheduler.disk_loads.is_useless(1)
    assert scheduler.disk_loads.end(1) == 2


def test_a_request_waits_for_states_that_it_can_resume_from_only():
    """At least one token is computed; one that is as long as the load would wait for nothing."""
    scheduler = make(slots=2)
    longer = begin(scheduler, 2)
    equal = request_of(10, range(8))
    add(scheduler, equal)
    assert [scheduler.disk_loads.awaited_by(one, 0) for one in (longer, equal)] == [1, None]


def test_a_load_is_useless_without_the_blocks_before_it():
    """Other ranks are told how it ends."""
    scheduler = make(blocks=2)
    commands: list[LoadCommand] = []
    scheduler.disk_loads.record = commands.append
    begin(scheduler, 2, cached=1)
    assert not scheduler.disk_loads.is_useless(1)
    scheduler.cache.allocate(2)
    assert scheduler.disk_loads.is_useless(1)
    assert scheduler.disk_loads.end(1) == 1
    assert commands == [BeginLoad(1, 9, 2, has_snapshot=False), EndLoad(1)]


def test_blocks_before_a_load_are_used_when_it_begins():
    """The load is of no use if they are evicted first."""
    scheduler = make(blocks=2)
    cache = scheduler.cache
    request = request_of(9, range(9))
    add(scheduler, request)
    for block_hash in (request.block_hashes[0], X):
        cache.release(cache.publish([block_hash], cache.allocate(1), None))
    scheduler.disk_loads.begin(1, request, 2, has_snapshot=False)
    cache.allocate(1)
    assert cache.find(request.block_hashes[0]) is not None


@pytest.mark.parametrize(
    "forget",
    [
        Scheduler.reset_prefix_cache,
        Scheduler.suspend,
        lambda scheduler: scheduler.weights_changed(restarts=False),
        lambda scheduler: scheduler.quarantine(X, states_only=False),
    ],
    ids=["reset", "suspend", "weights", "quarantine"],
)
def test_what_makes_entries_useless_ends_loads(forget: Callable[[Scheduler], object]):
    """EX-15: what was read before must not be placed after it."""
    scheduler = make()
    request, loads = begin(scheduler, 2), scheduler.disk_loads
    loads.note_run(request, 2)
    loads.is_due = True
    forget(scheduler)
    assert (len(loads), loads.is_due) == (0, False)
    is_left = request.snapshot_plan.end_on_disk
    assert is_left == (2 if scheduler.cache.epoch == 0 else 0), "a run of entries that are gone"
