"""Disk tier of the cache: what it writes, which loads it begins, and until when it waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.cache import CachedEntry
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind
from megatron_ext.prefix_cache.disk.restore import Agreement
from megatron_ext.prefix_cache.disk.tier import MAX_LOADS, DiskTier, EntrySizes, LoadableRun
from megatron_ext.prefix_cache.disk.tier_storage import OFF, READ, LoadEstimates, MeasuredRate
from tests.unit_tests.engine.disk_machine import FakeDisk

NAMES = [b"a", b"b", b"c", b"d"]
TOKENS = list(range(16))


class Clock:
    now = wall = 100.0

    def __call__(self) -> float:
        return self.now


def tier_with(
    *, blocks: str = "", snapshots: str = "", has_states: bool = True, ranks: Agreement | None = None
) -> tuple[DiskTier, FakeDisk, Clock]:
    """A tier that holds blocks and snapshots of one sequence a, b, c, d, named by letters."""
    disk, clock = FakeDisk(), Clock()
    sizes = EntrySizes((100,), (1000,) if has_states else None)
    tier = DiskTier(disk, sizes, lambda entry, used: (entry, [(used,)]), clock, 5.0, ranks, lambda: clock.wall)
    entries = []
    for kind, names in (("block", blocks), ("slot", snapshots)):
        for name in names:
            depth = "abcd".index(name)
            places = {"block": None, "slot": None} | {kind: depth}
            parent = NAMES[depth - 1] if depth else None
            entries.append(CachedEntry(NAMES[depth], parent, depth + 1, **places))
    tier.on_evicted(entries)
    return tier, disk, clock


@pytest.mark.parametrize(
    ("blocks", "snapshots", "matched", "expected"),
    [
        ("abcd", "bd", 0, (4, 0, 1400)),
        ("abcd", "b", 0, (2, 0, 1200)),
        ("cd", "d", 2, (4, 2, 1200)),
        ("", "b", 3, (2, 2, 1000)),
        ("abd", "bd", 0, (2, 0, 1200)),  # a hole ends the run
        ("abcd", "", 0, None),
        ("", "", 4, None),
    ],
)
def test_the_run_that_is_loaded(blocks, snapshots, matched, expected):
    """EX-11: up to the last snapshot that can be reached, and only what memory lacks."""
    tier, _, _ = tier_with(blocks=blocks, snapshots=snapshots)
    run = tier.find_run(NAMES, matched, 4)
    assert (None if run is None else (run.end, run.first, run.size)) == expected


class CountedLookUps(dict):
    """Entries that count how often they are looked for."""

    count = 0

    def __contains__(self, key: object) -> bool:
        self.count += 1
        return super().__contains__(key)


def test_a_run_is_looked_for_once():
    """EX-11: each step asks for 16 waiting requests; what is added later extends the run, what goes ends it."""
    tier, disk, _ = tier_with(blocks="abc", has_states=False)
    tier._held = held = CountedLookUps(tier._held)
    for end, most in ((3, 4), (3, 1)):
        held.count = 0
        assert tier.end_of_blocks(NAMES, 0) == end
        assert held.count <= most
    tier.on_evicted([CachedEntry(b"d", b"c", 4, 3, None)])
    assert tier.end_of_blocks(NAMES, 0) == 4
    disk.evict(EntryKey(EntryKind.BLOCK, b"b"))
    tier.follow()
    assert tier.end_of_blocks(NAMES, 0) == 1
    for number in range(2000):
        tier.end_of_blocks([bytes([number % 256]), bytes([number // 256])], 0)
    assert len(tier._runs) < 500


def test_a_resume_point_is_looked_for_once():
    """EX-11: a long prefix without a snapshot at its end would be searched in each step."""
    tier, disk, _ = tier_with(blocks="abcd", snapshots="a")
    tier._held = held = CountedLookUps(tier._held)
    for most in (9, 2):
        held.count = 0
        assert tier.find_run(NAMES, 0, 4).end == 1
        assert held.count <= most
    tier.on_evicted([CachedEntry(b"c", b"b", 3, None, 0)])
    assert tier.find_run(NAMES, 0, 4).end == 3
    disk.evict(EntryKey(EntryKind.SNAPSHOT, b"c"))
    tier.follow()
    assert tier.find_run(NAMES, 0, 4).end == 1


def test_what_is_read_is_checked_against_the_tokens_of_the_request():
    """EX-11: each block's, and those of the snapshot's block."""
    tier, disk, _ = tier_with(blocks="ab", snapshots="b")
    asked = []
    disk.load = lambda load: asked.extend(load.items)
    tier.begin(tier.find_run(NAMES, 1, 4), NAMES, TOKENS, 4)
    assert [(one.key.kind, one.key.block_hash, one.tokens, one.sizes) for one in asked] == [
        (EntryKind.BLOCK, b"b", [4, 5, 6, 7], (100,)),
        (EntryKind.SNAPSHOT, b"b", [4, 5, 6, 7], (1000,)),
    ]


def test_entries_are_used_in_the_order_in_which_they_leave_memory():
    """EX-11: also within one eviction, and if the clock stands still or goes back."""
    tier, disk, clock = tier_with(blocks="dcb")
    clock.wall = 50.0
    tier.on_evicted([CachedEntry(b"a", None, 1, 0, None)])
    times = [content[0] for content in disk.entries.values()]
    assert times == sorted(set(times))


def test_what_is_on_disk_is_not_written_again_but_is_used_now():
    """EX-11."""
    tier, disk, _ = tier_with(blocks="ab")
    touched = {}
    disk.touch = lambda used: touched.update(used) or []
    first = dict(disk.entries)
    tier.on_evicted([CachedEntry(b"b", b"a", 2, 1, None), CachedEntry(b"a", None, 1, 0, None)])
    assert (disk.entries, tier.counts.evicted) == (first, 2)
    assert sorted(touched, key=touched.__getitem__) == [EntryKey(EntryKind.BLOCK, name) for name in (b"b", b"a")]


def test_what_left_the_disk_in_the_meantime_is_written_again():
    """EX-11: it would be in neither tier."""
    tier, disk, _ = tier_with(blocks="ab")
    disk.evict(EntryKey(EntryKind.BLOCK, b"b"))
    tier.on_evicted([CachedEntry(b"b", b"a", 2, 1, None)])
    tier.follow()
    assert tier.counts.evicted == 3
    assert EntryKey(EntryKind.BLOCK, b"b") in tier
    assert EntryKey(EntryKind.BLOCK, b"b") in disk.entries


def test_entries_that_the_disk_dropped_are_not_loaded():
    """EX-11."""
    tier, disk, _ = tier_with(blocks="abc", has_states=False)
    disk.evicted.append(EntryKey(EntryKind.BLOCK, b"b"))
    tier.follow()
    assert tier.find_run(NAMES, 0, 4).end == 1
    disk.is_dead = True
    tier.follow()
    tier.on_evicted([CachedEntry(b"d", b"c", 4, 3, None)])
    assert tier.find_run(NAMES, 0, 4) is None
    assert len(tier) == 0


def test_a_load_is_given_up_at_its_deadline():
    """EX-11: what comes later is not taken; what has come by then is placed."""
    tier, disk, clock = tier_with(blocks="ab", has_states=False)
    run = tier.find_run(NAMES, 0, 4)
    ready, late = (tier.begin(run, NAMES, TOKENS, 4) for _ in range(2))
    disk.finish(ready, is_read=True)
    tier.follow()
    clock.wall += 3600.0  # it was set
    assert (tier.late(), tier.complete()) == ([], [ready])
    clock.now += 5.0
    assert tier.is_due
    assert (tier.late(), tier.complete()) == ([late], [ready])
    tier.give_up(late)
    assert disk.cancelled == [late]
    disk.finish(late, is_read=True)
    tier.follow()
    assert tier.complete() == [ready]


def test_loads_are_bounded_in_number_and_bytes():
    """EX-11: but one load is always possible, however large."""
    tier, _, _ = tier_with(blocks="ab", has_states=False)
    run, huge = tier.find_run(NAMES, 0, 4), LoadableRun(2, 0, False, 2**40)
    assert tier.has_room(huge)
    for _ in range(MAX_LOADS):
        assert tier.has_room(run)
        assert not tier.loads or not tier.has_room(huge)
        tier.begin(run, NAMES, TOKENS, 4)
    assert not tier.has_room(run)


def test_what_is_decided_by_time_is_counted():
    """EX-11: loads that are read already take no more time of the disk; without time for loads there are none."""
    tier, disk, _ = tier_with(blocks="ab", has_states=False)
    run = tier.find_run(NAMES, 0, 4)
    tier.estimates.reading.note(run.size, 1.0)
    tier.estimates.prefill.note(100, 1.0)
    tier.begin(run, NAMES, TOKENS, 4)
    assert not tier.pays(run, 150)
    disk.finish(1, is_read=True)
    tier.follow()
    assert tier.pays(run, 150)
    assert tier.counts.loads_slower == 1
    tier._load_seconds = 0.0
    assert tier.find_run(NAMES, 0, 4) is None


def test_a_load_begins_only_where_reading_is_quicker_than_computing():
    """EX-11: both rates are measured; as long as one is unknown, it is to become known."""
    estimates = LoadEstimates()
    assert estimates.pays(10**9, 0, 1)
    estimates.reading.note(1000, 1.0)
    assert estimates.pays(10**9, 0, 1)
    estimates.prefill.note(100, 1.0)
    assert estimates.pays(1000, 0, 101)
    assert not estimates.pays(1000, 0, 99)
    assert not estimates.pays(1000, 500, 140)  # others are read before


def test_a_rate_that_decides_against_loads_is_measured_again_some_time():
    """EX-11: one slow read does not end all loads."""
    estimates = LoadEstimates()
    estimates.reading.note(1000, 100.0)
    estimates.prefill.note(100, 1.0)
    refusals = 0
    while not estimates.pays(1000, 0, 1000):
        refusals += 1
    assert 10 < refusals < 1000


def test_a_rate_follows_what_was_measured_last():
    rate = MeasuredRate()
    assert rate.seconds_for(1) is None
    for _ in range(50):
        rate.note(100, 1.0)
    for _ in range(20):
        rate.note(100, 2.0)
    assert rate.seconds_for(100) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "states_only", "left"),
    [
        (b"c", False, {"a", "b", "A", "B"}),
        (b"c", True, {"a", "b", "c", "A", "B"}),
        (b"a", False, set()),
    ],
)
def test_quarantine_drops_an_entry_and_what_was_computed_from_it(wrong, states_only, left):
    """EX-15: on disk, too; capitals are snapshots."""
    tier, disk, _ = tier_with(blocks="abcd", snapshots="abcd")
    number = tier.begin(tier.find_run(NAMES, 0, 4), NAMES, TOKENS, 4)
    tier.quarantine(wrong, BlockIndex(), states_only=states_only)
    found = {
        key.block_hash.decode() if key.kind is EntryKind.BLOCK else key.block_hash.decode().upper()
        for key in disk.entries
    }
    assert found == left
    assert {key for key in disk.entries if key in tier} == disk.entries.keys()
    assert (len(tier), tier.drops) == (len(left), {"quarantined": 8 - len(left)})
    assert disk.cancelled == [number]
    tier.begin(tier.find_run(NAMES, 0, 4) or LoadableRun(1, 0, False, 1), NAMES, TOKENS, 4)
    tier.clear()
    assert (len(tier), tier.loads, disk.cancelled) == (0, {}, [number, number + 1])


def test_quarantine_follows_parents_that_are_in_memory_only():
    """EX-15: and drops what it cannot trace to the start of its sequence."""
    for index_has, left in (("ab", {b"d"}), ("", set())):
        tier, disk, _ = tier_with(blocks="d")
        index = BlockIndex()
        if index_has:
            index.add(NAMES[:3], [0, 1, 2], None)
        tier.quarantine(b"other", index, states_only=False)
        assert {key.block_hash for key in disk.entries} == left


class OtherRank(Agreement):
    """Agreement with a rank whose progress and nanoseconds of its only load are given; without any it still reads."""

    def __init__(self, progress: int | None, nanoseconds: int = 0) -> None:
        self.row, self.reports = [progress, -nanoseconds], []

    def report(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        self.reports.append(numbers[0])
        return lambda: None if self.row[0] is None else self.least(numbers)

    def least(self, numbers: Sequence[int]) -> list[int]:
        return [min(pair) for pair in zip(numbers, self.row, strict=True)]


def begun(other: OtherRank) -> tuple[DiskTier, FakeDisk]:
    """A tier that has read its part of a load of three entries."""
    tier, disk, _ = tier_with(blocks="ab", snapshots="b", ranks=other)
    assert tier.begin(tier.find_run(NAMES, 0, 4), NAMES, TOKENS, 4) == 1
    disk.finish(1, is_read=True)
    tier.follow()
    return tier, disk


def test_a_load_is_complete_when_all_ranks_have_read_it():
    """EX-11: and took as long as the slowest of them."""
    assert begun(OtherRank(None))[0].complete() == []
    tier, _ = begun(OtherRank(READ, nanoseconds=4 * 10**9))
    assert tier.complete() == [1]
    tier.follow()  # again, as long as there is no room for it
    assert (tier.counts.load_seconds, tier.counts.load_bytes) == (4.0, 1200)


def test_an_entry_that_another_rank_cannot_read_is_dropped():
    """EX-11: it is not tried again, and when it leaves memory again it is written anew on all ranks."""
    tier, disk = begun(OtherRank(1))
    second = EntryKey(EntryKind.BLOCK, NAMES[1])
    assert tier.failed() == {1: 1}
    tier.give_up(1, 1)
    assert second not in tier
    assert second not in disk.entries
    assert tier.drops == {"incomplete": 1}
    assert len(disk.entries) == len(tier) == 2


def test_a_rank_whose_disk_has_failed_ends_the_use_of_all():
    """EX-11: in one step, and what all have read may still be placed."""
    tier, _ = begun(OtherRank(OFF))
    assert tier.failed() == {1: OFF}
    tier.give_up(1, OFF)
    assert tier.is_off
    assert not tier.loads
    tier, _ = begun(OtherRank(READ))
    tier.turn_off()
    assert tier.complete() == [1]
    assert len(tier) == 0, "nothing is loaded any more"
    tier.check()


def test_each_load_is_reported_once_and_in_the_order_of_their_beginning():
    """EX-11, MR-2: ranks report the same loads, whichever ends first, and those that are given up, too."""
    ranks = OtherRank(READ)
    tier, disk, _ = tier_with(blocks="ab", snapshots="b", ranks=ranks)
    for _ in range(4):
        tier.begin(tier.find_run(NAMES, 0, 4), NAMES, TOKENS, 4)
    for number in (2, 4):
        disk.finish(number, is_read=True)
        tier.follow()
    assert ranks.reports == []
    tier.give_up(1)
    assert len(ranks.reports) == 2
    assert tier.complete() == []
    tier.follow()
    assert tier.complete() == [2]
    tier.turn_off()
    assert ranks.reports[1:] == [READ, OFF, OFF]
    tier.follow()
    assert (tier.complete(), tier.failed()) == ([2], {4: OFF})


def test_a_rank_without_recurrent_layers_asks_for_snapshots_of_others():
    """EX-11: a pipeline stage of a hybrid model may have none; its snapshots have no bytes."""
    tier = DiskTier(FakeDisk(), EntrySizes((100,), ()), lambda entry, used: (entry, [()]), Clock(), 5.0)
    places = [EntryKey(EntryKind.BLOCK, NAMES[0]), EntryKey(EntryKind.BLOCK, NAMES[1])]
    tier.hold({places[0]: None, places[1]: NAMES[0]})
    assert tier.find_run(NAMES, 0, 4) is None
    tier.hold({EntryKey(EntryKind.SNAPSHOT, NAMES[0]): None})
    assert tier.find_run(NAMES, 0, 4) == LoadableRun(1, 0, True, 100)


def test_times_are_estimated_by_the_largest_part():
    """EX-11: a stage without recurrent layers reads nothing of a snapshot, and waits for the others."""
    tier, _, _ = tier_with(blocks="ab", snapshots="b", ranks=OtherRank(-40, nanoseconds=7000))
    assert tier.find_run(NAMES, 0, 4).size == 200 + 1000
    tier.agree_on_sizes()
    assert tier.find_run(NAMES, 0, 4).size == 200 + 7000
