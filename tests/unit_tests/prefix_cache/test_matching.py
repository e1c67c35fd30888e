"""Start of computing: the last boundary with a snapshot, found in few look-ups for any prompt length (CU-6)."""

from __future__ import annotations

import hashlib

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.matching import resume_point

BLOCK = 16


class Watched(list):
    """Block hashes, and how many of them were looked at."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)


def chain(name: str, length: int) -> list[bytes]:
    return [hashlib.blake2b(f"{name} {i}".encode(), digest_size=32).digest() for i in range(length)]


def cached(*chains: list[bytes], slots: int = 400) -> PrefixCache:
    cache = PrefixCache(sum(map(len, chains)), EvictionPolicyName.LRU, slots)
    for block_hashes in chains:
        cache.publish(block_hashes, cache.allocate(len(block_hashes)), None)
    return cache


def snapshot(cache: PrefixCache, block_hash: bytes) -> None:
    cache.states.reserve(block_hash)
    cache.states.commit(block_hash)


@pytest.mark.parametrize(("at", "most"), [(8_192, 1), (8_180, 13), (10, 110), (None, 110)])
def test_few_are_looked_at(at, most):
    """CU-6: look-ups are bounded by the numbers of blocks and of snapshots; near the end there are hardly any."""
    own, others = chain("own", 8_192), chain("others", 80)
    cache = cached(own, others)
    for block_hash in [*others[:50], *([own[at - 1]] if at else [])]:
        snapshot(cache, block_hash)
    matched = Watched(own)
    found = resume_point(8_192 * BLOCK + 1, matched, BLOCK, cache.states, cache.depth_of)
    assert found.position == (at or 0) * BLOCK
    assert matched.looks - bool(at) <= most


def test_a_match_ends_where_it_did_in_a_few_looks():
    """CU-6: why no match is found ahead, and kept: 8,192 blocks cost fewer than thirty look-ups."""
    own = chain("own", 8_192)
    cache = cached(own[:6_000])
    block_hashes = Watched(own)
    assert len(cache.match(block_hashes)) == 6_000
    assert block_hashes.looks < 30
