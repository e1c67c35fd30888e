"""Cache of one process that the next one finds, and what must not be found there; blocks without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.disk.agreement import SingleRankAgreement
from megatron_ext.prefix_cache.disk.entry_copies import NoMemory
from megatron_ext.prefix_cache.disk.opening import open_directory_store
from megatron_ext.prefix_cache.disk.warm_restart import WarmRestart
from megatron_ext.prefix_cache.hash_chain import hash_blocks, packed_tokens
from tests.unit_tests.prefix_cache.disk.lives import BLOCK, IDENTITY, LIMIT, ROOT

TOKENS = packed_tokens(range(6 * BLOCK))
HASHES = hash_blocks(ROOT, TOKENS, BLOCK)

Start = Callable[..., tuple[WarmRestart, PrefixCache]]


class Bytes(NoMemory):
    """Memory whose blocks have one byte, their number."""

    def block_buffers(self) -> list[bytearray]:
        return [bytearray(1)]

    def snapshot_buffers(self) -> list[bytearray]:
        return []

    def read_block(self, block: int) -> list[bytes]:
        return [bytes([block])]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function: an empty cache, with its store in the directory of all of them."""
    made = []

    def make(ranks: SingleRankAgreement | None = None) -> tuple[WarmRestart, PrefixCache]:
        store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
        cache = PrefixCache(len(HASHES), EvictionPolicyName.LRU, keeps_tokens=True)
        made.append(WarmRestart(store, cache, Bytes(), 100.0, 100.0, ranks))
        return made[-1], cache

    yield make
    for one in made:
        one.abandon()


def fill(cache: PrefixCache) -> None:
    """Cache one sequence, which no request uses any more."""
    blocks = cache.publish(HASHES, cache.allocate(len(HASHES)), None)
    cache.cached_token_ids.keep_run(HASHES, ROOT, TOKENS, BLOCK, len(TOKENS))
    cache.release(blocks)


@pytest.fixture(params=["no tier", "a live tier", "a tier that is off"])
def restarted(request: pytest.FixtureRequest, start: Start) -> tuple[WarmRestart, PrefixCache]:
    """A cache with what an earlier one has left."""
    restart, cache = start()
    fill(cache)
    restart.close()
    restart, cache = start()
    restart.load()
    assert restart.loaded == len(HASHES)
    if request.param != "no tier":
        restart.go_live()
    if request.param == "a tier that is off":
        restart.tier.turn_off()
    return restart, cache


def test_what_the_cache_forgets_is_not_found_by_the_next_one(restarted, start):
    """DC-4."""
    restart, cache = restarted
    cache.reset()
    restart.abandon()
    assert start()[0].counts()["blocks"] == 0


def test_what_was_computed_from_a_wrong_entry_is_not_found_by_the_next_one(restarted, start):
    """EX-15: though no tier takes or loads anything."""
    restart, cache = restarted
    restart.quarantine(HASHES[2], cache.entries.index, states_only=False)
    restart.abandon()
    assert start()[0].counts()["blocks"] == 2


def test_nothing_of_new_weights_is_kept_under_the_identity_of_the_old(start):
    """DC-2: neither while the engine runs, nor at its end."""
    restart, cache = start()
    restart.weights_changed()
    assert restart.go_live() == []
    fill(cache)
    restart.close()
    assert start()[0].counts()["blocks"] == 0


class SlowerRank(SingleRankAgreement):
    """Agreement with a rank that has no time to write the fourth entry."""

    def least_written(self, number: int, seconds: float) -> int:
        return min(number, 3)


def test_ranks_write_the_same_entries(start):
    """DC-4: what another rank has no time for is not kept here, either."""
    restart, cache = start(SlowerRank())
    fill(cache)
    restart.close()
    assert restart.left_out == len(HASHES) - 3
    assert start()[0].counts()["blocks"] == 3
