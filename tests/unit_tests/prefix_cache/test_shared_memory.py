"""One memory for blocks and snapshots: what goes for what, and where it lies then."""

from __future__ import annotations

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.slabs import Arena
from megatron_ext.prefix_cache.snapshot_order import Rank
from tests.priority import TestPriority

pytestmark = pytest.mark.priority(TestPriority.HIGH)


def key(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32))


def make(slabs: int, blocks: int = 2, snapshots: int = 1, spare: int = 0) -> PrefixCache:
    return PrefixCache(0, EvictionPolicyName.LRU, slabs=SlabLayout(slabs, blocks, snapshots, spare))


def leave(cache: PrefixCache, *names: str) -> None:
    """Cache blocks of one sequence, which no request uses any more."""
    table = cache.publish([key(name) for name in names], cache.allocate(len(names)), None)
    cache.release(table)


def take(cache: PrefixCache, name: str, rank: Rank = Rank.ORDINARY) -> bool:
    if cache.states.reserve(key(name), rank) is None:
        return False
    cache.states.commit(key(name))
    cache.border.take_moves()
    cache.check()
    return True


def test_blocks_of_a_request_take_the_slabs_of_snapshots():
    cache = make(2)
    leave(cache, "a", "b")
    assert take(cache, "b")
    assert cache.available_count == 4
    cache.allocate(4)
    assert not cache.states.visible()
    cache.check()
    assert cache.changes.retyped_slabs


def test_a_slab_that_is_written_to_is_not_available():
    cache = make(2)
    leave(cache, "a", "b")
    cache.states.reserve(key("b"))
    assert cache.available_count == 2


def test_blocks_that_fill_no_slab_hold_blocks_only():
    cache = make(1, blocks=3, spare=2)
    leave(cache, "a", "b")
    assert take(cache, "b")
    use = cache.use()
    assert (use.blocks_total, use.slots_total, use.slabs_of_blocks, use.slabs_of_snapshots) == (2, 1, 0, 1)
    assert cache.available_count == 5
    cache.allocate(5)
    use = cache.use()
    assert (use.blocks_total, use.slots_total, use.slabs_of_blocks, use.slabs_of_snapshots) == (5, 0, 1, 0)
    cache.check()


def test_the_older_goes_whichever_it_is():
    cache = make(3)
    leave(cache, "a", "b")
    leave(cache, "c", "d")
    assert take(cache, "d")
    assert take(cache, "c")  # a and b are older than the snapshot of d
    assert cache.match([key("a")]) == []
    assert cache.states.visible() == {key("c"), key("d")}


@pytest.mark.parametrize("rank", [Rank.OPPORTUNISTIC, Rank.OPTIONAL])
def test_a_snapshot_of_little_worth_makes_no_block_go(rank: Rank):
    """SI-1."""
    cache = make(1)
    leave(cache, "a", "b")
    assert not take(cache, "b", rank)
    assert len(cache.match([key("a"), key("b")])) == 2


def test_blocks_in_use_move_together_with_their_contents():
    cache = make(3)
    first = cache.allocate(5)  # all slabs hold blocks
    cache.release(first[:1] + first[2:4])  # a block is left in the first slab, and one in the last
    kept = [first[1], first[4]]
    assert cache.states.reserve(key("x")) is not None  # a free slab
    assert cache.states.reserve(key("y")) is not None  # only if both blocks lie in one slab
    moves = cache.border.take_moves()
    assert [cache.pool.references(moves.get(block, block)) for block in kept] == [1, 1]
    assert dict(cache.changes.block_copies) == moves
    assert len(moves) == 1


def test_a_snapshot_whose_block_is_in_use_is_passed_over():
    cache = make(3)
    leave(cache, "a")
    leave(cache, "b")  # in the same slab
    assert take(cache, "a")
    assert take(cache, "b")
    cache.pin(cache.match([key("a")]))
    assert cache.border._next_snapshot() < float("inf")
    assert cache.states.next_victim()[1] == key("b")


def test_the_part_of_a_slab_never_holds_snapshots():
    cache = make(1, blocks=3, spare=2)
    leave(cache, "a", "b")  # in the part, which is filled first
    leave(cache, "c", "d")
    cache.states.reserve(key("d"))  # a and b go, c and d move to their places
    cache.states.commit(key("d"))
    assert cache.border.take_moves()
    cache.check()
    assert len(cache.match([key("c"), key("d")])) == 2
    assert cache.match([key("a")]) == []
    assert cache.states.visible() == {key("d")}
    assert (cache.use().slots_total, cache.use().slabs_of_snapshots) == (1, 1)


@pytest.mark.parametrize("number", range(4))
def test_a_slab_that_is_written_to_is_not_emptied(number: int):
    slots = Arena(SlabLayout(3, 4, 2)).slots
    taken = slots.take(4)  # two slabs
    pinned = taken[number]
    slots.pin(pinned)
    other = next(slot for slot in taken if slot // 2 != pinned // 2)
    slots.give([pinned ^ 1, other])
    assert slots.evacuate() == [(other ^ 1, pinned ^ 1)]
    slots.check()
