"""Shares of blocks and snapshots that later prompts contain, and what they decide in a memory that both share."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache import reuse as reuse_module
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.reuse import ASSUMED_SLABS, Reuse
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.snapshot_order import Rank

LAYOUT = SlabLayout(slabs=4, blocks_per_slab=2)


def key(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32))


def keys(names: Iterable[str]) -> list[BlockHash]:
    return list(map(key, names))


def store(cache: PrefixCache, names: str, *snapshots: str, rank: Rank = Rank.ORDINARY) -> None:
    """Cache blocks of one sequence, which no request uses any more, with snapshots at the ends of some."""
    cache.release(cache.publish(keys(names), cache.allocate(len(names)), None))
    for name in snapshots:
        assert cache.states.reserve(key(name), rank) is not None
        cache.states.commit(key(name))
    cache.check()


def test_entries_that_a_later_prompt_contains_count_as_used():
    reuse = Reuse(LAYOUT)
    assert (reuse.of_blocks, reuse.of_snapshots, reuse.snapshot_aging) == (1, 1, 1)
    reuse.on_blocks_stored(keys("abcd"))
    for name in "bd":
        reuse.on_snapshot_stored(key(name))
    reuse.on_prompt(keys("abxy"))
    reuse.on_prompt(keys("ab"))  # for the second time
    blocks, snapshots = 2 * ASSUMED_SLABS, ASSUMED_SLABS
    assert reuse.of_blocks == (blocks + 2) / (blocks + 4)
    assert reuse.of_snapshots == (snapshots + 1) / (snapshots + 2)
    reuse.on_blocks_stored(keys("cd"))  # after an eviction, still not used
    assert reuse.of_blocks == (blocks + 2) / (blocks + 4)
    reuse.on_blocks_stored(keys("a"))
    assert reuse.of_blocks == (blocks + 2) / (blocks + 5)
    reuse.check()


def test_the_last_two_periods_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reuse_module, "MIN_PERIOD", 3)
    reuse = Reuse(SlabLayout(slabs=1, blocks_per_slab=2))
    reuse.on_snapshot_stored(key("c"))
    for names in ("abc", "def"):
        reuse.on_blocks_stored(keys(names))
    assert reuse.of_snapshots < 1
    reuse.on_prompt(keys("ab"))
    assert reuse.of_blocks == (2 * ASSUMED_SLABS + 2) / (2 * ASSUMED_SLABS + 6)
    reuse.on_blocks_stored(keys("ghi"))
    assert reuse.of_blocks == (2 * ASSUMED_SLABS) / (2 * ASSUMED_SLABS + 6)
    assert reuse.of_snapshots == 1
    reuse.on_prompt(keys("abc"))  # of a period that no longer counts
    reuse.check()


@pytest.mark.parametrize("rank", Rank)
def test_ordinary_snapshots_count(rank: Rank):
    cache = PrefixCache(0, EvictionPolicyName.LRU, slabs=LAYOUT)
    store(cache, "ab", "b", rank=rank)
    reuse = cache.shared_memory.reuse
    assert (reuse.of_snapshots < 1) == (rank is Rank.ORDINARY)
    assert reuse.of_blocks < 1
    cache.note_prompt(keys("ab"))
    assert (reuse.of_blocks, reuse.of_snapshots) == (1, 1)


@pytest.mark.parametrize(("blocks", "snapshots"), [(1, 0), (0, 0), (0, 1)])
def test_what_is_used_again_stays_longer(blocks: int, snapshots: int):
    """A younger snapshot goes before old blocks if only blocks are used again; else the blocks go."""
    cache = PrefixCache(0, EvictionPolicyName.LRU, slabs=SlabLayout(3, 2))
    reuse, others = cache.shared_memory.reuse, keys(map(str, range(200)))
    reuse.on_blocks_stored(others)
    for other in others[:100]:  # equal bytes
        reuse.on_snapshot_stored(other)
    for entries, share in ((reuse._blocks, blocks), (reuse._snapshots, snapshots)):
        if share:
            entries[0].unused.clear()
    store(cache, "ab")
    store(cache, "cd", "d")
    for _ in range(20):
        next(cache.unused._clock)  # time passes
    store(cache, "", "c")  # in place of a and b, or of the snapshot of d
    is_snapshot_gone = blocks > snapshots
    assert cache.states.visible() == ({key("c")} if is_snapshot_gone else {key("c"), key("d")})
    assert len(cache.match(keys("ab"))) == (2 if is_snapshot_gone else 0)


def test_slabs_of_snapshots_that_new_requests_leave_alone():
    """Half of all slabs at most, and fewer if snapshots are not used again; slabs that are written to count."""
    cache = PrefixCache(0, EvictionPolicyName.LRU, slabs=LAYOUT)
    assert cache.kept_for_snapshots == 0
    store(cache, "ab", "a")
    assert cache.kept_for_snapshots == 2  # blocks
    store(cache, "", "b")
    cache.note_prompt(keys("ab"))
    assert cache.kept_for_snapshots == 4
    assert cache.states.reserve(key("c")) is not None
    assert cache.kept_for_snapshots == 2
    cache.states.cancel(key("c"))
    for name in "0123456789":
        cache.shared_memory.reuse.on_snapshot_stored(key(name))
    assert cache.kept_for_snapshots == 2
    assert cache.available_count == 8
    assert PrefixCache(4, EvictionPolicyName.LRU, slots=4).kept_for_snapshots == 0
