"""Entries that the cache gives to the tier below memory: which ones, when, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.block_index import BlockIndex
from megatron_ext.prefix_cache.cache import CachedEntry, PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.snapshot_order import Rank
from tests.unit_tests.prefix_cache.test_shared_memory import key, leave, make


class Tier:
    """Tier that notes what it is given, and that each entry is still cached then."""

    def __init__(self, cache: PrefixCache) -> None:
        self.taken: list[tuple[str, str]] = []
        self._cache = cache
        cache.lower_tier = self

    def on_evicted(self, entries: Sequence[CachedEntry]) -> None:
        for one in entries:
            kind = "snapshot" if one.block is None else "block"
            found = self._cache.entry(one.block_hash, is_snapshot=one.block is None)
            assert found == one, "an entry was given away before it was handed over"
            self.taken.append((kind, one.block_hash.decode().strip()))

    def quarantine(self, block_hash: BlockHash, index: BlockIndex, *, states_only: bool) -> None: ...

    def clear(self) -> None:
        self.is_cleared = True


def snapshot(cache: PrefixCache, name: str, rank: Rank = Rank.ORDINARY) -> None:
    cache.states.reserve(key(name), rank)
    cache.states.commit(key(name))


def test_a_block_is_handed_over_with_its_snapshot_and_after_its_children():
    """EX-11."""
    cache = PrefixCache(3, EvictionPolicyName.LRU, 3)
    tier = Tier(cache)
    leave(cache, "a", "b", "c")
    snapshot(cache, "b")
    cache.release(cache.allocate(2))
    assert tier.taken == [("block", "c"), ("block", "b"), ("snapshot", "b")]


@pytest.mark.parametrize(("rank", "expected"), [(Rank.ORDINARY, 1), (Rank.OPTIONAL, 1), (Rank.OPPORTUNISTIC, 0)])
def test_a_snapshot_that_gives_up_its_slot_is_handed_over_if_it_was_asked_for(rank, expected):
    """EX-11."""
    cache = PrefixCache(3, EvictionPolicyName.LRU, 1)
    tier = Tier(cache)
    leave(cache, "a", "b")
    snapshot(cache, "a", rank)
    snapshot(cache, "b")
    assert tier.taken == [("snapshot", "a")] * expected
    cache.release(cache.allocate(3))
    assert ("snapshot", "b") in tier.taken


def test_what_is_dropped_or_forgotten_is_not_handed_over():
    """EX-11, EX-15."""
    cache = PrefixCache(3, EvictionPolicyName.LRU, 3)
    tier = Tier(cache)
    leave(cache, "a", "b")
    snapshot(cache, "b")
    cache.states.drop(key("b"))
    cache.drop_all(cache.continuations(key("b"), itself=True))
    cache.reset()
    assert tier.taken == []
    assert tier.is_cleared


def test_a_snapshot_whose_states_are_still_to_be_copied_lies_where_they_are():
    """EX-11: the states after a draft, or of a step launched ahead, become a snapshot with the next step's copies."""
    cache = make(3)
    leave(cache, "a")
    slot = cache.states.reserve(key("a"))
    apart = cache.shared_memory.arena.layout.first_apart_slot
    cache.states.exchange(key("a"), apart)
    cache.states.commit(key("a"))
    assert cache.entry(key("a"), is_snapshot=True).slot == apart
    cache.note_changes_sent()
    assert cache.entry(key("a"), is_snapshot=True).slot == slot


def test_entries_that_are_still_to_be_moved_lie_at_their_old_places():
    """EX-11: a slab is emptied by copies that are made with the next step."""
    cache = make(3, blocks=2)
    leave(cache, "a", "b")
    leave(cache, "c")
    leave(cache, "d", "e")
    before = {name: cache.find(key(name)) for name in "abcde"}
    for name in "ad":
        assert cache.states.reserve(key(name)) is not None
        cache.states.commit(key(name))
    moved = [name for name in "abcde" if cache.find(key(name)) not in (None, before[name])]
    assert moved
    for name in moved:
        assert cache.entry(key(name), is_snapshot=False).block == before[name]
    cache.note_changes_sent()
    for name in moved:
        assert cache.entry(key(name), is_snapshot=False).block == cache.find(key(name))
