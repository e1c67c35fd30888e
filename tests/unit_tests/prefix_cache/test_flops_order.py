"""EX-10, SI-2: the order of evictions by `flops`: the age of blocks and snapshots, and the entries that are weighed."""

from __future__ import annotations

import pytest

from megatron_ext.config.costs import EntryCosts
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.flops import FlopsSnapshots, chance
from megatron_ext.prefix_cache.snapshot_order import Rank
from tests.unit_tests.prefix_cache.test_flops import COSTS, FLOPS, operations


def keys_per_eviction(leaves: int) -> float:
    """Number of entries weighed for each evicted block, and for each snapshot."""
    cache = PrefixCache(2 * leaves, FLOPS, leaves, COSTS)
    weighed = []
    for part, name in ((cache._policy, "_key"), (cache.states._order._others, "_key")):
        rank = getattr(part, name)
        setattr(part, name, lambda item, rank=rank: (weighed.append(item), rank(item))[1])
    for i in range(leaves):
        table = cache.allocate(2)
        names = [b"%d/%d" % (i, depth) for depth in range(2)]
        cache.publish(names, table, None)
        take(cache, names[1])
        cache.release(table)
    weighed.clear()
    cache.release(cache.allocate(leaves))
    return len(weighed) / leaves


def test_an_eviction_does_not_look_at_all_there_is():
    """SI-2: O(log n): so many entries are weighed, however many there are."""
    assert keys_per_eviction(2000) == pytest.approx(keys_per_eviction(20), rel=0.2)
    assert keys_per_eviction(2000) < 5


def test_a_deep_block_outlives_as_much_as_it_is_worth():
    """SI-2: the weight of worth against age follows from the load: nothing stays for ever."""
    cache = PrefixCache(5, FLOPS, costs=EntryCosts(token_flops=1.0, position_flops=1.0))
    deep = [b"a", b"b", b"c", b"d"]  # worth 1 to 4
    table = cache.allocate(4)
    cache.publish(deep, table, None)
    cache.release(table)
    depths = []
    for i in range(5):  # others worth 1, each in place of the one before
        table = cache.allocate(1)
        cache.publish([b"%d" % i], table, None)
        cache.release(table)
        depths.append(len(cache.match(deep)))
    assert depths == [4, 4, 4, 4, 3], "the fourth of them stands at 4, as the deep one, which is older"


def test_the_age_of_blocks_does_not_go_back():
    """SI-2: a block ranks lower than the block that it continues, and is evicted after it."""
    cache = PrefixCache(7, FLOPS, costs=EntryCosts(token_flops=0.0, position_flops=1.0))
    publish = {name: [b"%s%d" % (name, i) for i in range(length)] for name, length in ((b"a", 3), (b"b", 4), (b"c", 3))}
    for name in (b"a", b"b"):
        table = cache.allocate(len(publish[name]))
        cache.publish(publish[name], table, None)
        cache.release(table)
    table = cache.allocate(3)  # the blocks of a go, which stand at 2, 1 and 0; the last one of b stands at 3
    cache.publish(publish[b"c"], table, None)
    cache.release(table)  # at an age of 2; the last one stands at 4
    cache.allocate(1)
    assert [len(cache.match(publish[name])) for name in (b"a", b"b", b"c")] == [0, 3, 3]


def test_snapshots_age_as_well():
    """SI-2: an unused snapshot is evicted after as much computing has passed as it is worth."""
    cache = PrefixCache(20, FLOPS, 2, EntryCosts())
    table = cache.allocate(4)
    cache.publish([b"deep%d" % i for i in range(4)], table, None)
    take(cache, b"deep3")
    for i in range(5):
        assert cache.states.find(b"deep3") is not None, f"gone after {i}"
        cache.publish([b"flat%d" % i], cache.allocate(1), None)
        take(cache, b"flat%d" % i)
    cache.publish([b"last"], cache.allocate(1), None)
    take(cache, b"last")
    assert cache.states.find(b"deep3") is None, "four of a worth of one have gone by, and it stands at four"


def test_used_snapshot_is_charged_from_snapshots_taken_since():
    """SI-2: until then it is charged for the edge that it was taken at the end of."""
    index = BlockIndex()
    index.add([b"a", b"b", b"c"], [0, 1, 2], None)
    snapshots = FlopsSnapshots(index, COSTS)
    snapshots.add(b"c", Rank.ORDINARY)
    snapshots.add(b"a", Rank.ORDINARY)
    assert snapshots.edge(b"c") == (3, operations(0, 3) * chance(0, is_continued=False))
    snapshots.use(b"c")
    assert snapshots.edge(b"c") == (2, operations(1, 3) * chance(1, is_continued=False))
    snapshots.remove(b"a")
    assert snapshots.edge(b"c") == (3, operations(0, 3) * chance(1, is_continued=False))


def take(cache: PrefixCache, block_hash: bytes, rank: Rank = Rank.ORDINARY) -> None:
    cache.states.reserve(block_hash, rank)
    cache.states.commit(block_hash)


def take_alone(cache: PrefixCache, name: bytes, depth: int = 1, rank: Rank = Rank.ORDINARY) -> bytes:
    """A snapshot at the end of a sequence of its own; worth as much as the sequence has blocks."""
    names = [b"%s/%d" % (name, i) for i in range(depth)]
    cache.publish(names, cache.allocate(depth), None)
    take(cache, names[-1], rank)
    return names[-1]


def test_the_age_of_slots_never_sinks():
    """SI-2: the age does not sink if a valuable snapshot is evicted, and then one of little value."""
    cache = PrefixCache(20, FLOPS, 2, EntryCosts())
    take_alone(cache, b"little")
    take_alone(cache, b"much", 4, Rank.OPTIONAL)
    first = take_alone(cache, b"first")  # in place of "much", which stood at 4
    second = take_alone(cache, b"second")  # in place of "little", which stood at 1
    take_alone(cache, b"third")
    there = [cache.states.find(one) is not None for one in (first, second)]
    assert there == [False, True], "both stand at 5, so the older one goes"


def test_a_snapshot_that_is_used_stands_at_the_age_of_now():
    """SI-2: a used snapshot lives as long as one taken now that is worth as much."""
    cache = PrefixCache(20, FLOPS, 2, EntryCosts())
    deep = take_alone(cache, b"deep", 3)
    for i in range(3):
        take_alone(cache, b"before%d" % i)
    cache.states.consume(deep)  # at age 2, for 3 * 2 by now
    for i in range(5):
        take_alone(cache, b"after%d" % i)
        assert cache.states.find(deep) is not None, f"it goes after {i}, and stands at 8"


def test_the_age_of_blocks_never_sinks():
    """SI-2: the age does not sink if a block is worth less than its continuation, and is evicted earlier."""
    cache = PrefixCache(4, FLOPS, costs=EntryCosts(token_flops=0.0, position_flops=1.0))
    table = cache.allocate(3)
    cache.publish([b"a", b"b", b"c"], table, None)  # worth 0, 1 and 2
    cache.release(table)
    for name in (b"x", b"y"):  # in place of "c", then of "b"
        table = cache.allocate(2)
        cache.publish([name], table[:1], None)
        cache.release(table)
    assert len(cache.match([b"a", b"b"])) == 1
    cache.release(cache.allocate(2))  # "a" goes
    cache.release(cache.allocate(3))
    assert [len(cache.match([name])) for name in (b"x", b"y")] == [0, 1], "both stand at 2, so the older one goes"


def test_the_parent_of_a_dropped_block_can_be_evicted():
    """EX-15: dropping wrong entries leaves no block that can never go."""
    cache = PrefixCache(3, FLOPS, costs=COSTS)
    names = [b"a", b"b", b"c"]
    table = cache.allocate(3)
    cache.publish(names, table, None)
    cache.release(table)
    assert cache.drop_all(cache.continuations(b"b", itself=True)) == 2
    cache.check()
    cache.release(cache.allocate(3))
    assert not cache.match(names)
