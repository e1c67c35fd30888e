"""One memory for blocks and snapshots: what goes for what, and where it lies then."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.slabs import NO_CHANGES
from megatron_ext.prefix_cache.snapshot_order import Rank


def key(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32))


def make(slabs: int, blocks: int = 2, spare: int = 0) -> PrefixCache:
    return PrefixCache(0, EvictionPolicyName.LRU, slabs=SlabLayout(slabs, blocks, spare))


def leave(cache: PrefixCache, *names: str) -> None:
    """Cache blocks of one sequence, which no request uses any more."""
    table = cache.publish([key(name) for name in names], cache.allocate(len(names)), None)
    cache.release(table)


def watch_moves(cache: PrefixCache) -> dict[BlockId, BlockId]:
    """Return the new place of each block that moves from now on, also if it moves again."""
    moved: dict[BlockId, BlockId] = {}

    def follow(moves: Mapping[BlockId, BlockId]) -> None:
        first = {new: old for old, new in moved.items()}
        moved.update({first.get(old, old): new for old, new in moves.items()})

    cache.shared_memory.arena.blocks.tables.append(follow)
    return moved


def take(cache: PrefixCache, name: str, rank: Rank = Rank.ORDINARY) -> bool:
    if cache.states.reserve(key(name), rank) is None:
        return False
    cache.states.commit(key(name))
    cache.check()
    return True


@pytest.mark.parametrize("sizes", [(2, 2, 0), (1, 4, 3)])
def test_slots_apart_begin_after_the_dummy_block(sizes: tuple[int, int, int]):
    """States after drafts would be overwritten by keys that are not to be stored."""
    layout = SlabLayout(*sizes)
    assert layout.first_apart_slot * layout.blocks_per_slab > layout.dummy_block


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
    kept, moves = [first[1], first[4]], watch_moves(cache)
    assert cache.states.reserve(key("x")) is not None  # a free slab
    assert cache.states.reserve(key("y")) is not None  # only if both blocks lie in one slab
    assert [cache.pool.references(moves.get(block, block)) for block in kept] == [1, 1]
    assert dict(cache.changes.block_copies) == moves
    assert len(moves) == 1


def test_a_block_that_moves_twice_is_found_where_it_lies_last():
    """HY-5: its bytes are copied once, from where they lie; an old place has another request's contents."""
    cache = make(3, blocks=3)
    blocks = cache.allocate(9)  # all slabs hold blocks
    kept, moves = blocks[0], watch_moves(cache)
    cache.release([*blocks[1:3], blocks[5], blocks[8]])
    assert cache.states.reserve(key("x")) is not None  # the block left in the first slab moves
    place = moves[kept]
    others = [block for block in range(place // 3 * 3, place // 3 * 3 + 3) if block != place]
    cache.release(others)
    assert cache.states.reserve(key("y")) is not None  # and again, together with no other
    assert moves.keys() == {kept}
    assert moves[kept] != place
    assert cache.pool.references(moves[kept]) == 1
    assert dict(cache.changes.block_copies) == moves
    cache.release([moves[kept]])
    assert not cache.changes.block_copies, "nothing is copied to a free place"


def test_a_snapshot_that_nobody_asked_for_goes_before_blocks_move():
    """SI-1: room for another snapshot costs no copy then."""
    cache = make(3)
    first = cache.allocate(5)  # all slabs hold blocks
    cache.release(first[:1] + first[2:4])
    assert cache.states.reserve(key("x"), Rank.OPPORTUNISTIC) is not None
    cache.states.commit(key("x"))
    assert cache.states.reserve(key("y")) is not None
    assert not cache.changes.block_copies
    assert cache.states.provisional_given_up == 1


def test_copies_of_a_message_are_pending_until_it_is_obeyed():
    cache = make(3)
    first = cache.allocate(5)
    cache.release(first[:1] + first[2:4])
    for name in "xy":
        assert cache.states.reserve(key(name)) is not None
    assert cache.changes.has_copies
    cache.note_changes_sent()
    cache.note_changes_sent()  # with nothing to tell
    assert cache.are_copies_pending, "the copies of the message before may fail yet"
    assert cache.changes == NO_CHANGES
    cache.note_changes_applied()
    assert not cache.are_copies_pending


def test_a_reset_lets_slabs_that_are_written_to_go():
    """EX-4: they would never hold blocks again; snapshots that were never used are counted as given up."""
    cache = make(4)
    leave(cache, "a", "b")
    assert take(cache, "a", Rank.OPPORTUNISTIC)
    assert cache.states.reserve(key("b")) is not None
    cache.reset()
    cache.check()
    assert cache.available_count == 8
    assert cache.states.provisional_given_up == 1


def test_free_blocks_make_room_for_snapshots_together_with_unused_ones():
    cache = make(1)
    leave(cache, "a")
    assert cache.states.obtainable_count == 1


def test_what_a_request_has_used_is_as_new_as_its_blocks():
    """HY-5: the snapshot that it resumed from would go long before them."""
    cache = make(3)
    leave(cache, "a", "b")
    assert take(cache, "b")
    table = cache.match([key("a"), key("b")])
    cache.pin(table)
    cache.release(list(table), [key("b")])
    assert cache.states.next_victim()[0] > cache.unused.next_priority()


def test_snapshots_whose_blocks_are_in_use_are_passed_over():
    cache = make(6)
    for name in "abc":
        leave(cache, name)
    for name in "abc":
        assert take(cache, name)
    for name in "ab":
        cache.pin(cache.match([key(name)]))
    assert cache.shared_memory._next_snapshot() < float("inf")
    assert cache.states.next_victim()[1] == key("c")


def test_the_part_of_a_slab_never_holds_snapshots():
    cache = make(1, blocks=3, spare=2)
    leave(cache, "a", "b")  # in the part, which is filled first
    leave(cache, "c", "d")
    cache.states.reserve(key("d"))  # a and b go, c and d move to their places
    cache.states.commit(key("d"))
    assert cache.changes.block_copies
    cache.check()
    assert len(cache.match([key("c"), key("d")])) == 2
    assert cache.match([key("a")]) == []
    assert cache.states.visible() == {key("d")}
    assert (cache.use().slots_total, cache.use().slabs_of_snapshots) == (1, 1)


def test_entries_of_the_first_waiting_requests_go_last():
    """SC-5: a spared snapshot after younger blocks, and spared blocks after younger snapshots."""
    cache = make(4)
    leave(cache, "a")
    assert take(cache, "a")
    leave(cache, "b", "c")
    assert take(cache, "c")
    cache.spare([[key("a")]])
    kept = []
    for _ in range(4):
        cache.allocate(2)
        kept.append(
            [name for name in "abc" if cache.find(key(name)) is not None]
            + [name.upper() for name in "abc" if cache.states.find(key(name)) is not None]
        )
    assert kept[-1] == []
    assert any({"a", "A"} & {*one} for one in kept[1:])
    for one in kept:
        assert {"a", "A"} & {*one} or not one, "an entry stays that is not spared"
        assert "A" in one or not {"b", "c", "C"} & {*one}, "a spared snapshot goes before others"
