"""Loads of evicted entries from disk for waiting requests: when they begin and end, and random lives beside a disk."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from megatron_ext.config import EvictionPolicyName
from megatron_ext.engine.disk_loading import DiskLoading, LoadPlacing
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind
from megatron_ext.prefix_cache.disk.tier import DiskTier, EntrySizes
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.slabs import NO_CHANGES, ArenaChanges
from megatron_ext.scheduling.disk_loads import NoteRun
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.engine.disk_machine import DiskMachine, FakeDisk, FakeMemory
from tests.unit_tests.prefix_cache.test_shared_memory import key as key_of
from tests.unit_tests.prefix_cache.test_shared_memory import leave
from tests.unit_tests.scheduling.builders import make_limits, request_of, step

QUICK, SAMPLE, WHOLE = 25, 120, 3000  # lives


@pytest.mark.parametrize(
    "lives", [QUICK, pytest.param(SAMPLE, marks=pytest.mark.long), pytest.param(WHOLE, marks=pytest.mark.soak)]
)
def test_random_lives_beside_a_disk(lives):
    """EX-11: nothing wrong is read or written to disk, nothing is lost, and every request comes to an end."""
    run_state_machine_as_test(
        DiskMachine,
        settings=settings(
            max_examples=lives,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


class Notes(FakeMemory):
    """Memory that notes in which order it is changed."""

    def __init__(self, layout: SlabLayout | None = None) -> None:
        super().__init__(layout)
        self.calls: list[str] = []
        self.written: list[object] = []

    def write_block(self, block: int, buffers: list[object]) -> None:
        self.calls.append("block")
        self.written += buffers[0]

    def write_snapshot(self, slot: int, block_hash: BlockHash, buffers: list[object]) -> None:
        self.calls.append("snapshot")
        self.written += buffers[0]

    def make_changes(self, changes: ArenaChanges) -> None:
        self.calls.append("changes")


class Situation:
    """A scheduler with a disk that has the prefixes that it is given."""

    def __init__(self, layout: SlabLayout | None = None, blocks: int = 8) -> None:
        limits = make_limits(slabs=layout, total_blocks=blocks if layout is None else layout.blocks)
        self.scheduler = Scheduler(limits, EvictionPolicyName.LRU, b"model")
        self.disk, self.memory, self.now = FakeDisk(), Notes(layout), 0.0
        self.tier = DiskTier(
            self.disk,
            EntrySizes((8,), None if layout is None else (8,)),
            lambda *_: (None, [()]),
            lambda: self.now,
            10.0,
        )
        self.scheduler.cache.lower_tier = self.tier
        self.loading = DiskLoading(self.scheduler, self.tier, self.memory)

    def request(self, arrival: int, tokens: range, on_disk: int = 0) -> Request:
        """A waiting request; the disk has so many blocks of its prompt."""
        request = request_of(arrival, tokens, num_tokens_to_generate=1)
        self.scheduler.add(request)
        for depth, block_hash in enumerate(request.block_hashes[:on_disk], 1):
            key = EntryKey(EntryKind.BLOCK, block_hash)
            self.tier.hold({key: request.block_hashes[depth - 2] if depth > 1 else None})
            self.disk.entries[key] = (depth,)
        if on_disk and self.scheduler.cache.states is not None:
            snapshot = EntryKey(EntryKind.SNAPSHOT, request.block_hashes[on_disk - 1])
            self.tier.hold({snapshot: None})
            self.disk.entries[snapshot] = ("states",)
        return request

    def serve(self, request: Request) -> None:
        while not request.is_ended:
            step(self.scheduler)

    def decide(self) -> None:
        self.loading.follow()
        self.loading.decide()


def test_a_load_whose_beginning_was_evicted_is_given_up():
    """EX-11: at once, since its entries continue what is not there."""
    found = Situation(blocks=8)
    found.serve(found.request(0, range(8)))
    waiting = found.request(1, range(20), on_disk=5)
    found.decide()
    assert found.disk.loads.keys() == {1}
    assert len(found.disk.loads[1]) == 3, "what memory has is not read"
    found.scheduler.cache.release(found.scheduler.cache.allocate(8))
    found.decide()
    assert not found.disk.loads.get(1)
    assert (found.tier.counts.loads_useless, found.tier.counts.load_waits) == (1, 1)
    assert found.scheduler.disk_loads.awaited_by(waiting, 0) == 2, "it begins a load of what is missing now"


def test_a_request_begins_two_loads_at_most():
    """EX-11: what is evicted before its turn again and again is computed."""
    found = Situation(blocks=8)
    waiting = found.request(0, range(20), on_disk=5)
    for _ in range(4):
        found.decide()
        for number in list(found.disk.loads):
            found.disk.finish(number, is_read=True)
        found.decide()
        found.scheduler.cache.release(found.scheduler.cache.allocate(8))
    assert found.tier.counts.loads == found.tier.counts.loads_placed == 2
    assert not found.scheduler.waits_for_disk(waiting)


def test_a_load_that_is_late_is_not_begun_again():
    """EX-11: neither for the request that began it nor for those that waited for it, too."""
    found = Situation(blocks=16)
    waiting = [found.request(arrival, range(20), on_disk=5) for arrival in range(2)]
    found.decide()
    found.scheduler.disk_loads.waiting(1).update(waiting)
    found.now += 10.0
    for _ in range(2):
        found.decide()
    assert (found.tier.counts.loads, found.tier.counts.loads_late) == (1, 1)
    assert not any(map(found.scheduler.waits_for_disk, waiting))


def test_a_load_that_is_complete_is_placed_however_long_the_step_took():
    """EX-11: on slow steps nothing would come back; for want of room it is given up, and its request computes."""
    found = Situation(blocks=8)
    waiting = found.request(0, range(20), on_disk=5)
    found.decide()
    found.disk.finish(1, is_read=True)
    found.now += 12.0
    found.decide()
    assert (found.tier.counts.loads_placed, found.tier.counts.loads_late) == (1, 0)
    found.scheduler.end(waiting, Outcome(Status.ABORTED))
    found.scheduler.cache.reset()
    held = found.scheduler.cache.allocate(3)
    waiting = found.request(1, range(20), on_disk=5)
    found.decide()
    found.disk.finish(2, is_read=True)
    held += found.scheduler.cache.allocate(1)
    found.decide()
    assert found.scheduler.waits_for_disk(waiting)
    found.now += 12.0
    found.decide()
    assert (found.tier.counts.loads_placed, found.tier.counts.loads_late) == (1, 1)
    assert not found.scheduler.disk_loads
    found.scheduler.cache.release(held)


def test_nothing_is_looked_for_on_disk_without_room(monkeypatch):
    """EX-11: waiting prompts would cost milliseconds in each step."""
    found = Situation(blocks=8)
    found.request(0, range(20), on_disk=5)
    held = found.scheduler.cache.allocate(8)
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "find_run", None)
        found.decide()
    found.scheduler.cache.release(held)
    found.decide()
    assert found.disk.loads.keys() == {1}


def test_a_quarantine_that_fails_ends_complete_loads(monkeypatch):
    """EX-11, EX-15: each later step would fail."""
    found = Situation(blocks=8)
    waiting = found.request(0, range(20), on_disk=5)
    found.decide()
    found.disk.finish(1, is_read=True)
    found.tier.follow()
    monkeypatch.setattr(DiskTier, "quarantine", None)
    with pytest.raises(TypeError):
        found.scheduler.quarantine(waiting.block_hashes[0], states_only=False)
    found.decide()
    assert 1 not in found.tier.loads


def test_a_load_begins_only_where_there_is_room_for_it():
    """EX-11: not by taking what running requests have."""
    found = Situation(blocks=8)
    found.request(0, range(100, 116))
    found.scheduler.schedule()
    waiting = found.request(1, range(20), on_disk=5)
    found.decide()
    assert not found.disk.loads
    found.scheduler.end(next(iter(found.scheduler.queues.running)), Outcome(Status.ABORTED))
    found.decide()
    assert found.scheduler.waits_for_disk(waiting)


def test_pending_copies_are_made_before_loaded_entries_are_written():
    """EX-11: a place that they read may be one that is given to the load."""
    found = Situation(SlabLayout(4, 2))
    cache = found.scheduler.cache
    for names in (("a", "b"), ("c",), ("d", "e")):
        leave(cache, *names)
    for name in "ad":
        assert cache.states.reserve(key_of(name)) is not None
        cache.states.commit(key_of(name))
    assert cache.changes.block_copies
    found.request(0, range(8), on_disk=1)
    found.decide()
    found.disk.finish(1, is_read=True)
    found.decide()
    assert found.tier.counts.loads_placed == 1
    assert found.memory.calls == ["changes", "block", "snapshot"]
    assert found.memory.written == [1, "states"]
    assert cache.changes == NO_CHANGES
    assert not cache.are_copies_pending, "they are made, so a step that fails loses nothing"


def test_what_came_into_memory_meanwhile_is_not_written_again():
    """EX-11: the entries after it are those of the later blocks."""
    found = Situation(blocks=8)
    cache, waiting = found.scheduler.cache, found.request(0, range(20), on_disk=4)
    found.decide()
    cache.release(cache.publish(waiting.block_hashes[:1], cache.allocate(1), None))
    found.disk.finish(1, is_read=True)
    found.decide()
    assert found.memory.written == [2, 3, 4]


def test_a_load_that_cannot_be_written_gives_its_places_back():
    """EX-11: what was moved for it may be lost, so that all requests start again."""
    found = Situation(blocks=8)
    found.request(0, range(50, 53))
    found.scheduler.schedule()
    found.request(1, range(20), on_disk=4)
    found.decide()
    found.disk.finish(1, is_read=True)
    found.memory.write_block = None
    with pytest.raises(TypeError):
        found.decide()
    assert not found.scheduler.queues.holding()
    assert found.scheduler.cache.available_count == 8
    found.scheduler.check()


def test_a_disk_that_has_failed_holds_up_no_request():
    """EX-11: loads that the tier has given up are over for the scheduler, too."""
    found = Situation()
    waiting = found.request(0, range(20), on_disk=5)
    found.decide()
    assert found.scheduler.waits_for_disk(waiting)
    found.tier.turn_off()
    found.decide()
    assert not found.scheduler.disk_loads


def test_one_load_is_placed_before_each_step():
    """EX-11: the next one could evict it before its request has had its turn; until then a step must be planned."""
    found = Situation(blocks=12)
    for arrival in range(2):
        found.request(arrival, range(100 * arrival, 100 * arrival + 20), on_disk=5)
    found.decide()
    for number in (1, 2):
        found.disk.finish(number, is_read=True)
    found.loading.follow()
    assert found.scheduler.disk_loads.is_due
    found.loading.decide(may_wait=False)
    assert found.tier.counts.loads_placed == 1


def test_the_engine_waits_for_the_disk_only_if_it_has_nothing_to_compute():
    """EX-11: and forgets how often a request has tried once it has ended."""
    found, waits = Situation(blocks=12), []
    found.disk.wait = lambda loads, seconds: waits.append(seconds)
    waiting = found.request(1, range(20), on_disk=5)
    found.decide()
    assert len(waits) == 1
    running = found.request(0, range(50, 53))
    found.scheduler.schedule()
    found.decide()
    assert len(waits) == 1
    for request in (running, waiting):
        found.scheduler.end(request, Outcome(Status.ABORTED))
    found.decide()
    assert not found.loading._attempts


def test_a_request_that_cannot_be_admitted_yet_begins_no_load(monkeypatch):
    """EX-11, SE-10: its entries could be evicted before its mask is known."""
    found = Situation()
    found.request(0, range(20), on_disk=5)
    monkeypatch.setattr(Request, "lacks_mask", True)
    found.decide()
    assert not found.disk.loads


def test_short_prefills_say_nothing_of_their_time():
    """EX-11: a step of a few tokens takes as long as one of many."""
    found = Situation()
    found.request(0, range(50, 53))
    plan = found.scheduler.schedule()
    found.loading.note_step(plan.chunks, 1.0)
    assert found.tier.estimates.prefill.seconds_for(1) is None


def test_another_rank_learns_how_far_a_prefix_goes_on_disk():
    """EX-11, MR-2: it takes a snapshot where the prefix ends there, as the rank that decides does."""
    found = Situation()
    request = found.request(0, range(20))
    placing = LoadPlacing(found.scheduler, found.tier, found.memory)
    placing.obey(NoteRun(request.request_id, 3), request)
    assert request.snapshot_plan.cached_end(1) == 3
