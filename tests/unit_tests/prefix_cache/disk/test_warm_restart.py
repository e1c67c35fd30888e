"""Cache of one process that the next one finds, and what must not be found there; blocks without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.disk import warm_restart
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind
from megatron_ext.prefix_cache.disk.entry_files import EntryFiles
from megatron_ext.prefix_cache.disk.restore import Agreement
from megatron_ext.prefix_cache.disk.store import open_directory_store
from megatron_ext.prefix_cache.disk.store_thread import StoreThread
from megatron_ext.prefix_cache.disk.warm_restart import EntryMemory, WarmRestart
from megatron_ext.prefix_cache.hash_chain import hash_blocks, packed_tokens
from tests.unit_tests.prefix_cache.disk.lives import BLOCK, IDENTITY, LIMIT, ROOT

TOKENS = packed_tokens(range(6 * BLOCK))
HASHES = hash_blocks(ROOT, TOKENS, BLOCK)

Start = Callable[..., tuple[WarmRestart, PrefixCache]]


class Bytes(EntryMemory):
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

    def make(ranks: Agreement | None = None) -> tuple[WarmRestart, PrefixCache]:
        store = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT)
        cache = PrefixCache(len(HASHES), EvictionPolicyName.LRU, keeps_tokens=True)
        made.append(WarmRestart(store, Bytes(), 100.0, 100.0, ranks))
        made[-1].go_live([cache])
        return made[-1], cache

    yield make
    for one in made:
        one.abandon()


def fill(cache: PrefixCache) -> None:
    """Cache one sequence, which no request uses any more."""
    blocks = cache.publish(HASHES, cache.allocate(len(HASHES)), None)
    cache.cached_token_ids.keep_run(HASHES, ROOT, TOKENS, BLOCK, len(TOKENS))
    cache.release(blocks)


@pytest.fixture(params=["a live tier", "a tier that is off"])
def restarted(request: pytest.FixtureRequest, start: Start) -> tuple[WarmRestart, PrefixCache]:
    """A cache with what an earlier one has left."""
    restart, cache = start()
    fill(cache)
    restart.close()
    restart, cache = start()
    assert restart.loaded == len(HASHES)
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
    cache.lower_tier.quarantine(HASHES[2], cache.index, states_only=False)
    restart.abandon()
    assert start()[0].counts()["blocks"] == 2


def test_nothing_of_new_weights_is_kept_under_the_identity_of_the_old(start):
    """DC-2: neither while the engine runs, nor at its end."""
    restart, cache = start()
    restart.weights_changed()
    assert restart.go_live([cache]) == []
    fill(cache)
    restart.close()
    assert start()[0].counts()["blocks"] == 0


def test_what_the_disk_does_not_answer_is_left_out(start, monkeypatch, caplog):
    """DC-1: the end waits for what is being written, and not for ever."""
    restart, cache = start()
    fill(cache)
    is_writing, may_go_on, write = threading.Event(), threading.Event(), EntryFiles.write

    def hang(*arguments: object) -> None:
        is_writing.set()
        assert may_go_on.wait(100)
        write(*arguments)

    monkeypatch.setattr(EntryFiles, "write", hang)
    monkeypatch.setattr(warm_restart, "STOP_SECONDS", 0.0)
    restart.tier.on_evicted([cache.entry(HASHES[0], is_snapshot=False)])
    assert is_writing.wait(100)
    restart.stop()
    restart.close()
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [warm_restart.NO_ANSWER]
    may_go_on.set()


def test_an_entry_that_waits_to_be_written_at_the_end(start, monkeypatch):
    """DC-1: if memory has it, too, it is written once, and counts as used now."""
    restart, cache = start()
    fill(cache)
    thread, may_go_on = restart._thread, threading.Event()
    thread._add(lambda: may_go_on.wait(100))
    restart.tier.on_evicted([cache.entry(HASHES[0], is_snapshot=False)])
    monkeypatch.setattr(thread, "touch", lambda used: (StoreThread.touch(thread, used), may_go_on.set()))
    restart.close()
    counts = restart.counts()
    assert (counts["written"], counts["blocks"], counts["left_out"]) == (len(HASHES), len(HASHES), 0)
    found = start()[0]._thread.run(lambda store: [stored.key.block_hash for stored in store.entries()])
    assert found == HASHES


class DamagedRank(Agreement):
    """Agreement with a rank that has all entries, and cannot read the fourth one."""

    calls = 0

    def least(self, numbers: Sequence[int]) -> list[int]:
        self.calls += 1
        return [*numbers[:3], 0, *numbers[4:]] if self.calls == 2 else list(numbers)


def test_what_another_rank_cannot_read_is_dropped(start):
    """DC-4: it is not put back, nor loaded later, and is written anew by all."""
    restart, cache = start()
    fill(cache)
    restart.close()
    restart, cache = start(DamagedRank())
    assert (restart.loaded, restart.counts()["drops"], len(restart.tier)) == (3, {"incomplete": 1}, 5)
    assert restart.counts()["blocks"] == 5


class Reports(Agreement):
    """Agreement that notes how often this rank reports a load."""

    count = 0

    def report(self, numbers: Sequence[int]) -> Callable[[], list[int] | None]:
        self.count += 1
        return lambda: None


@pytest.mark.parametrize("end", [WarmRestart.keep, WarmRestart.weights_changed, WarmRestart.abandon])
def test_loads_of_another_replica_are_reported_at_the_end(tmp_path, end):
    """EX-11, MR-2: its ranks report them, too, so that their next agreement is that of rank 0."""
    store, ranks = open_directory_store(tmp_path / "cache", IDENTITY, LIMIT), Reports()
    restart = WarmRestart(store, Bytes(), 100.0, 100.0, None, [ranks])
    caches = [PrefixCache(len(HASHES), EvictionPolicyName.LRU, keeps_tokens=True) for _ in range(2)]
    _, (tier, _) = restart.go_live(caches)
    tier.hold(dict.fromkeys(EntryKey(EntryKind.BLOCK, one) for one in HASHES))
    tier.begin(tier.find_run(HASHES, 0, len(HASHES)), HASHES, TOKENS, BLOCK)
    assert ranks.count == 0
    end(restart)
    assert ranks.count == 1
    restart.abandon()
