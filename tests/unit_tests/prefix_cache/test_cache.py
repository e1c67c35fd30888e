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
