"""KV-2 to KV-5, EX-4: the cache by literal cases; scheduling/caching_machine.py has random lives."""

from __future__ import annotations

import random

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.prefix_cache.slab_layout import SlabLayout

LRU, REF_ZERO = EvictionPolicyName.LRU, EvictionPolicyName.REF_ZERO
CHAIN = [b"a", b"b", b"c"]


def fill(cache, block_hashes):
    """A request that computes and publishes these blocks; returns its table."""
    matched = cache.match(block_hashes)
    cache.pin(matched)
    table = [*matched, *cache.allocate(len(block_hashes) - len(matched))]
    first = len(matched)
    table[first:] = cache.publish(block_hashes[first:], table[first:], block_hashes[first - 1] if first else None)
    cache.check()
    return table


def test_nothing_is_found_before_it_is_published():
    """KV-5."""
    cache = PrefixCache(4, LRU)
    blocks = cache.allocate(2)
    assert cache.match(CHAIN) == []
    cache.publish(CHAIN[:1], blocks[:1], None)
    assert cache.match(CHAIN) == blocks[:1]


def test_shared_blocks_are_counted_and_kept_until_the_last_owner_leaves():
    """KV-3."""
    cache = PrefixCache(4, REF_ZERO)
    first, second = fill(cache, CHAIN), fill(cache, CHAIN)
    assert first == second
    assert [cache.pool.references(block) for block in first] == [2, 2, 2]
    cache.release(first)
    assert cache.match(CHAIN) == second
    cache.release(second)
    assert cache.match(CHAIN) == []
    assert cache.pool.free_count == 4


def test_lru_keeps_contents_until_memory_is_needed_and_the_end_of_a_chain_goes_first():
    """KV-4: leaves first, oldest first."""
    cache = PrefixCache(4, LRU)
    cache.release(fill(cache, CHAIN))
    assert (cache.pool.free_count, cache.available_count) == (1, 4)
    assert len(cache.match(CHAIN)) == 3
    cache.allocate(2)
    assert len(cache.match(CHAIN)) == 2
    cache.allocate(1)
    assert len(cache.match(CHAIN)) == 1
    assert cache.use().blocks_evicted == 2
    cache.check()


def test_of_two_chains_the_one_used_longer_ago_goes_first():
    """KV-4."""
    cache = PrefixCache(6, LRU)
    old, new = fill(cache, [b"a", b"b"]), fill(cache, [b"x", b"y"])
    cache.release(old)
    cache.release(new)
    cache.release(fill(cache, [b"a", b"b"]))  # used again
    cache.allocate(3)
    assert len(cache.match([b"a", b"b"])) == 2
    assert len(cache.match([b"x", b"y"])) == 1


def test_a_block_in_use_is_never_evicted():
    """KV-3, KV-4: matched blocks are pinned before anything is allocated."""
    cache = PrefixCache(3, LRU)
    cache.release(fill(cache, CHAIN))
    matched = cache.match(CHAIN[:2])
    assert all(cache.is_evictable(block) for block in matched)
    cache.pin(matched)
    assert cache.available_count == 1
    (fresh,) = cache.allocate(1)
    assert fresh not in matched
    with pytest.raises(AssertionError, match="1 blocks asked, 0 available"):
        cache.allocate(1)
    cache.check()


def test_equal_contents_computed_twice_end_in_one_block():
    """KV-5: the second publisher uses the first one's block, so that a chain in a table is a chain in the index."""
    cache = PrefixCache(4, LRU)
    mine, yours = cache.allocate(1), cache.allocate(1)
    assert cache.publish([b"a"], mine, None) == tuple(mine)
    assert cache.publish([b"a"], yours, None) == tuple(mine)
    assert cache.pool.references(mine[0]) == 2
    assert cache.pool.references(yours[0]) == 0
    cache.check()


def test_a_run_that_begins_with_known_contents_goes_on_from_there():
    """KV-5: known blocks are swapped, unused ones return to use, and the other blocks are indexed after them."""
    cache = PrefixCache(5, LRU)
    left = fill(cache, CHAIN[:2])
    mine = cache.allocate(3)
    cache.release(left)
    assert cache.publish(CHAIN, mine, None) == (*left, mine[2])
    assert [cache.pool.references(block) for block in (*left, *mine)] == [1, 1, 0, 0, 1]
    assert cache.match(CHAIN) == [*left, mine[2]]
    assert cache.pool.free_count == 4 - 2
    cache.check()
    assert cache.publish(CHAIN, [*left, mine[2]], None) == (*left, mine[2])  # its own already
    cache.check()


def test_many_blocks_are_evicted_at_once():
    """KV-4: evicting many blocks at once equals evicting them one by one."""
    cache = PrefixCache(5, LRU)
    old, new = fill(cache, [b"a", b"b"]), fill(cache, [b"x", b"y", b"z"])
    cache.release(old)
    cache.release(new)
    assert sorted(cache.allocate(4)) == sorted([*old, *new[1:]])
    assert cache.use().blocks_evicted == 4
    assert cache.match([b"x", b"y", b"z"]) == new[:1]
    cache.check()


def test_reset_forgets_everything_and_leaves_blocks_in_use_alone():
    """EX-4."""
    cache = PrefixCache(5, LRU)
    running = fill(cache, [b"x"])
    cache.release(fill(cache, CHAIN))
    epoch = cache.epoch
    cache.reset()
    assert cache.epoch != epoch
    assert cache.match(CHAIN) == cache.match([b"x"]) == []
    assert (cache.pool.free_count, cache.use().blocks_in_use) == (4, 1)
    cache.check()
    cache.release(running)
    assert cache.pool.free_count == 5
    cache.check()


@pytest.mark.parametrize("forget", [lambda cache: cache.allocate(4), PrefixCache.reset], ids=["evict", "reset"])
def test_what_leaves_takes_along_what_is_known_of_it(forget):
    """KV-5: log-probs, tokens and origins would be those of blocks that are computed anew, or pile up."""
    cache = PrefixCache(4, LRU, 2, keeps_tokens=True)
    cache.release(fill(cache, CHAIN))
    cache.cached_token_ids.keep_run(CHAIN, b"root", [1, 2, 3], 1, 3)
    for kind in DataKind:
        assert cache.kept.keep(kind, CHAIN) == CHAIN
    cache.states.reserve(b"a")
    cache.states.commit(b"a")
    cache.origins.add_blocks(CHAIN)
    cache.origins.add_snapshot(b"a")
    forget(cache)
    cache.check()


def test_released_together_counts_shared_blocks_once():
    """KV-13: the count is the one on which a plan may rely."""
    cache = PrefixCache(6, LRU)
    first, second = fill(cache, CHAIN), fill(cache, [*CHAIN[:2], b"z"])
    assert cache.pool.releasable([first]) == {first[2]}
    assert cache.pool.releasable([second]) == {second[2]}
    assert cache.pool.releasable([first, second]) == {*first, *second}
    assert cache.pool.releasable([]) == set()


@pytest.mark.parametrize("policy", [LRU, REF_ZERO])
def test_a_pool_of_pinned_blocks_has_nothing_to_give(policy):
    """KV-12."""
    cache = PrefixCache(3, policy)
    fill(cache, CHAIN)
    assert cache.available_count == 0
    with pytest.raises(AssertionError):
        cache.allocate(1)


@pytest.mark.parametrize("damage", ["evictable but free", "indexed but free", "lost"])
def test_check_finds(damage):
    """Negative controls of the cache's own check."""
    cache = PrefixCache(4, LRU)
    table = fill(cache, CHAIN)
    if damage == "evictable but free":
        cache.release(table)
        cache.pool.free(table[:1])
    elif damage == "indexed but free":
        cache.pool.release([table[2]])
    else:
        cache.pool._free.take(1)
    with pytest.raises(AssertionError):
        cache.check()


def test_by_worth_has_parents_first_and_what_would_go_first_last():
    """DC-1: what is written to disk before time is up can be used."""
    cache = PrefixCache(9, LRU, slots=4)
    for chain in (CHAIN, [b"x", b"y"], [b"m", b"n"]):
        cache.release(fill(cache, chain))
    for block_hash in (b"b", b"y"):
        assert cache.states.reserve(block_hash) is not None
        cache.states.commit(block_hash)
    cache.states.consume(b"b")
    cache.check()
    order = list(cache.by_worth())
    assert order[:3] == [(b"a", False), (b"b", False), (b"b", True)], "its snapshot was used last"
    assert order[3:6] == [(b"x", False), (b"y", False), (b"y", True)]
    assert order[6:] == [(b"m", False), (b"n", False), (b"c", False)], "no snapshot needs them; used later comes first"
    plain = PrefixCache(9, LRU)
    tables = [fill(plain, chain) for chain in (CHAIN, [b"x", b"y"], [b"m", b"n"])]
    for table in tables[:2]:
        plain.release(table)
    assert [block_hash for block_hash, _ in plain.by_worth()] == [b"m", b"n", b"x", b"y", *CHAIN], "in use first"


@pytest.mark.parametrize("slots", [None, 4])
def test_entries_of_the_first_waiting_requests_go_last(slots: int | None):
    """SC-5: blocks from their ends, then others by age, and all of them can still be had."""
    cache = PrefixCache(9, LRU, slots)
    for letter in (b"x", b"y", b"z"):
        cache.release(fill(cache, [letter + bytes([i]) for i in range(3)]))
    cache.spare([[b"x\0", b"x\1", b"none"]])
    assert cache.available_count == 9
    gone = []
    for _ in range(9):
        cache.allocate(1)
        left = {letter: len(cache.match([letter + bytes([i]) for i in range(3)])) for letter in (b"x", b"y", b"z")}
        gone.append("".join(letter.decode() * count for letter, count in left.items()))
        cache.check()
    assert gone == ["xxyyyzzz", "xxyyzzz", "xxyzzz", "xxzzz", "xxzz", "xxz", "xx", "x", ""]


def test_a_spared_block_takes_those_before_it_along():
    """SC-5: a parent does not go before its child once both are spared no more."""
    cache = PrefixCache(3, LRU)
    child = fill(cache, [b"parent", b"child"])
    parent = fill(cache, [b"parent"])
    cache.release(child)
    cache.release(fill(cache, [b"other"]))
    cache.release(parent)
    cache.spare([[b"parent", b"child"]])
    cache.allocate(1)
    assert (len(cache.match([b"parent", b"child"])), len(cache.match([b"other"]))) == (2, 0)
    cache.spare([])
    cache.allocate(1)
    assert len(cache.match([b"parent", b"child"])) == 1
    cache.check()


def test_a_spared_parent_goes_after_all_of_its_children():
    """SC-5: two waiting requests continue one prefix in different ways."""
    cache = PrefixCache(4, LRU)
    branches = [[b"parent", b"one"], [b"parent", b"two"]]
    for branch in branches:
        cache.release(fill(cache, branch))
    cache.release(fill(cache, [b"other"]))
    cache.spare(branches)
    cache.allocate(1)
    assert [len(cache.match(run)) for run in (*branches, [b"other"])] == [2, 2, 0]
    cache.spare([])
    for left in ([1, 2], [1, 1], [0, 0]):
        cache.allocate(1)
        assert [len(cache.match(run)) for run in branches] == left
        cache.check()


@pytest.mark.parametrize("slabs", [None, SlabLayout(2, 4, 0)], ids=["blocks", "slabs"])
def test_lives_with_spared_branches(slabs):
    """SC-5: no block goes before its children, whatever is spared and in use."""
    for seed in range(60):
        rng, live = random.Random(seed), []
        cache = PrefixCache(0, LRU, slabs=slabs) if slabs else PrefixCache(8, LRU)

        def run(rng: random.Random = rng) -> list[bytes]:
            names = [rng.choice("abc") for _ in range(rng.randint(1, 4))]
            return ["".join(names[: end + 1]).encode() for end in range(len(names))]

        for _ in range(100):
            if rng.random() < 0.45:
                cache.spare([run() for _ in range(rng.randint(0, 3))])
            else:
                live.append(fill(cache, run()))
                while len(live) > rng.randint(0, 1):
                    cache.release(live.pop(rng.randrange(len(live))))
            cache.check()
        assert cache.use().blocks_evicted


def test_snapshots_of_the_first_waiting_requests_go_last():
    """SC-5: the oldest one that is spared, once there is no other."""
    cache = PrefixCache(9, LRU, 3)
    for letter in (b"x", b"y", b"z"):
        fill(cache, [letter])
        cache.states.reserve(letter)
        cache.states.commit(letter)
    cache.spare([[b"x", b"none"]])
    for left in ([b"x", b"z"], [b"x"], []):
        fill(cache, [b"new", b"of", b"other"][: 3 - len(left)])
        cache.states.reserve([b"new", b"of", b"other"][2 - len(left)])
        assert [one for one in (b"x", b"y", b"z") if cache.states.find(one) is not None] == left
