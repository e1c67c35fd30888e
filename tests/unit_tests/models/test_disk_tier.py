"""Disk tier of an engine: what memory gives up goes to disk and comes back, with the tokens of a cold run."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch

from megatron_ext.config import CacheConfig
from megatron_ext.engine import cache_audit
from megatron_ext.kv_events.changes import Changes, Delta
from megatron_ext.prefix_cache.cache import CachedEntry
from megatron_ext.prefix_cache.disk.entry import CHECKSUM_BYTES, EntryKind
from megatron_ext.prefix_cache.disk.entry_files import EntryFiles
from megatron_ext.prefix_cache.disk.tier import key_of
from megatron_ext.prefix_cache.disk.tier_storage import LoadEstimates
from megatron_ext.prefix_cache.hash_chain import BlockHash
from tests.on_request import long_except
from tests.unit_tests.models.test_durable_cache import PATIENCE, GetDriver, change, started
from tests.unit_tests.prefix_cache.disk.lives import damage, stored_in
from tests.unit_tests.support.driver import Driver, make_prompt

SMALL = {"block_count": 14}
PATIENT = {"prefix_cache_load_seconds": PATIENCE}
SMALL_ARENA = {"block_count": None, "buffer_size_gb": 0.0003}
KINDS = ["hybrid", "attention_only", "attention_free", "mamba1", "gated_delta_net", "short_conv", "side_by_side"]
QUICK = ["hybrid", "attention_only", "attention_free"]


@pytest.fixture(autouse=True)
def _any_load_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no measured time decide: the machine may be busy."""
    monkeypatch.setattr(LoadEstimates, "pays", lambda *_: True)


def serve(driver: Driver, prompt: list[int]) -> tuple[tuple[int, ...], list[float], int]:
    """Tokens, log-probs and skipped tokens of one request that is served alone."""
    number = len(driver.records)
    driver.add(number, prompt, skip_prompt_log_probs=True, num_tokens_to_generate=6)
    driver.run()
    driver.engine.check()
    record = driver.records[number]
    return record.generated_tokens, list(record.generated_log_probs), record.skipped_prefill_token_count


def push_out(driver: Driver, count: int = 3) -> None:
    """Serve other prompts, so that memory gives up what it had."""
    for seed in range(count):
        serve(driver, make_prompt(120, seed=100 + seed))


def settle(driver: Driver) -> None:
    """Wait until all that was evicted is in the files, and counted."""
    thread, left = driver.engine.core.disk._thread, [1]
    while left.pop():  # jobs go before writes
        thread.run(lambda _: left.append(thread.left_out))


def small(get_driver: GetDriver, directory: Path, kind: str = "hybrid", **cache: object) -> Driver:
    settings = {"snapshot_slots": 4} | PATIENT | cache
    return started(get_driver, directory, kind, cache=settings, **SMALL)


@pytest.mark.parametrize("kind", long_except(QUICK, KINDS))
def test_what_was_evicted_comes_back_from_disk(get_driver, tmp_path, kind):
    """EX-11: the skipped count is that of a hit in memory, tokens and log-probs those of a cold run."""
    driver = small(get_driver, tmp_path / "cache", kind)
    prompt = make_prompt(120)
    tokens, log_probs, skipped = serve(driver, prompt)
    assert skipped == 0
    _, _, in_memory = serve(driver, prompt)
    assert in_memory > 0
    push_out(driver)
    assert driver.engine.core.statistics().use.blocks_evicted > 0
    again, log_probs_again, from_disk = serve(driver, prompt)
    assert from_disk == in_memory
    assert again == tokens
    torch.testing.assert_close(torch.tensor(log_probs_again), torch.tensor(log_probs), atol=2e-4, rtol=0)
    counts = driver.engine.core.disk.counts()
    assert counts["loads_placed"] == 1
    assert counts["drops"] == {}
    driver.engine.close()


def test_memory_that_blocks_and_snapshots_share_gives_up_and_takes_back(get_driver, tmp_path):
    """EX-11: in an arena, too, where what is evicted may be about to move."""
    driver = started(get_driver, tmp_path / "cache", cache={"snapshot_slots": None} | PATIENT, **SMALL_ARENA)
    assert driver.engine.plan.world.slabs is not None
    prompts = [make_prompt(120, seed=seed) for seed in range(6)]
    cold = [serve(driver, prompt)[:2] for prompt in prompts]
    for _ in range(3):
        for prompt, (tokens, log_probs) in zip(prompts, cold, strict=True):
            again, log_probs_again, skipped = serve(driver, prompt)
            assert again == tokens
            torch.testing.assert_close(torch.tensor(log_probs_again), torch.tensor(log_probs), atol=2e-4, rtol=0)
            assert skipped >= 112
    counts, use = driver.engine.core.disk.counts(), driver.engine.core.statistics().use
    assert counts["loads_placed"] > 6
    assert use.slabs_retyped + use.blocks_moved > 0
    driver.engine.close()


DIVERGING = [80, 40, 72, 40, 80]  # tokens that each request has in common with the first one


def served_beside(driver: Driver) -> list[int]:
    """Skipped tokens of requests that diverge from a prompt, each after others have pushed out what memory had."""
    whole = make_prompt(120)
    serve(driver, whole)
    skipped = []
    for seed, common in enumerate(DIVERGING):
        push_out(driver)
        skipped.append(serve(driver, whole[:common] + make_prompt(50, seed=10 + seed))[2])
    return skipped


@pytest.mark.parametrize(
    ("kind", "mode"),
    long_except(
        [("hybrid", "kernel")], [(kind, mode) for kind in ("hybrid", "attention_free") for mode in ("kernel", "align")]
    ),
)
def test_a_request_that_diverges_from_what_is_on_disk_leaves_a_snapshot_there(get_driver, tmp_path, kind, mode):
    """EX-11, HY-4: later requests skip what they skip with a memory that holds all."""
    cache = {"provisional_slots": 0, "snapshot_mode": mode}
    driver = small(get_driver, tmp_path / "cache", kind, **cache)
    found = served_beside(driver)
    assert driver.engine.core.statistics().use.blocks_evicted > 0
    driver.engine.close()
    driver = get_driver(kind, cache=CacheConfig(snapshot_slots=100, **cache), block_count=400)
    assert found == served_beside(driver)
    assert driver.engine.core.statistics().use.blocks_evicted == 0
    assert max(found) == 80


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_the_end_of_a_prefix_on_disk_continues_its_start_in_memory(get_driver, tmp_path, kind):
    """EX-11: only what memory lacks is read."""
    driver = small(get_driver, tmp_path / "cache", kind)
    prompt = make_prompt(120)
    tokens, *_ = serve(driver, prompt)
    _, _, in_memory = serve(driver, prompt)
    serve(driver, make_prompt(140, seed=1))  # evicts the last blocks of the prompt, whose first ones stay
    settle(driver)  # what waits to be written is not read from the file
    cached = driver.engine.core.statistics().use.blocks_cached
    evicted = driver.engine.core.disk.counts()["evicted"]
    assert 0 < evicted < 14
    again, _, skipped = serve(driver, prompt)
    assert (again, skipped) == (tokens, in_memory)
    settle(driver)
    counts = driver.engine.core.disk.counts()
    assert counts["loads_placed"] == 1
    assert 0 < counts["read"] < 8, cached
    driver.engine.close()


def test_what_left_memory_first_leaves_the_disk_first(get_driver, tmp_path, monkeypatch):
    """EX-11: so the order on disk is that of the policy in memory."""
    driver = small(get_driver, tmp_path / "cache", prefix_cache_disk_gb=0.0003)
    tier, left = driver.engine.core.disk.tier, {}
    take = tier.on_evicted

    def note(entries: list[CachedEntry]) -> None:
        settle(driver)  # what has left the disk by now is written again
        tier.follow()
        for key in map(key_of, entries):
            left.pop(key, None)
            left[key] = None  # the last one to leave is the last one here
        take(entries)

    monkeypatch.setattr(tier, "on_evicted", note)
    for seed in (0, 1, 0, 2, 3, 1, 4, 0, 5, 6):
        serve(driver, make_prompt(100 + 10 * seed, seed=seed))
        settle(driver)
    tier.follow()
    on_disk = [key for key in left if key in tier]
    assert 10 < len(on_disk) < len(left)
    assert on_disk == list(left)[-len(on_disk) :]
    driver.engine.close()


def test_damaged_entries_on_disk_are_misses(get_driver, tmp_path):
    """EX-11, DC-3."""
    driver = small(get_driver, tmp_path / "cache")
    prompt = make_prompt(120)
    tokens, *_ = serve(driver, prompt)
    push_out(driver)
    settle(driver)
    for path in (tmp_path / "cache" / "slot-0").glob("*.*"):
        damage(path)
    again, _, skipped = serve(driver, prompt)
    assert (again, skipped) == (tokens, 0)
    settle(driver)
    counts = driver.engine.core.disk.counts()
    assert counts["loads_failed"] == 1
    assert counts["drops"]["checksum"] == 1
    driver.engine.close()


def test_nothing_of_new_weights_is_written_after_a_reset_of_the_engine(get_driver, tmp_path):
    """EX-11: block hashes begin anew then, and would be those of the old weights."""
    driver = small(get_driver, tmp_path / "cache")
    change(driver)
    driver.engine.reset()
    serve(driver, make_prompt(120))
    push_out(driver)
    assert driver.engine.core.statistics().use.blocks_evicted > 0
    counts = driver.engine.core.disk.counts()
    assert (counts["blocks"], counts["snapshots"], counts["written"]) == (0, 0, 0)
    driver.engine.close()


def test_an_error_of_the_tier_ends_its_use_and_costs_no_request(get_driver, tmp_path, monkeypatch, caplog):
    """EX-11: an eviction cannot fail."""
    driver = small(get_driver, tmp_path / "cache")
    prompt, disk = make_prompt(120), driver.engine.core.disk
    tokens, *_ = serve(driver, prompt)

    def fail(_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(disk.memory, "read_block", fail)
    push_out(driver)
    assert serve(driver, prompt)[0] == tokens
    assert len(disk.tier) == 0
    assert sum("could not be taken" in record.getMessage() for record in caplog.records) == 1
    driver.engine.close()


def break_down(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(EntryFiles, "write", fail)


def vanish(_: pytest.MonkeyPatch, slot: Path) -> None:
    shutil.rmtree(slot)


def become_read_only(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(EntryFiles, "sync", fail)


@pytest.mark.parametrize("trouble", [break_down, vanish, become_read_only])
def test_a_directory_that_fails_while_the_engine_serves(get_driver, tmp_path, monkeypatch, caplog, trouble):
    """DC-3: one line, and every request is served, those that wait for a load included."""
    driver = small(get_driver, tmp_path / "cache")
    prompts = [make_prompt(120, seed=seed) for seed in range(3)]
    cold = [serve(driver, prompt)[0] for prompt in prompts]
    settle(driver)
    trouble(monkeypatch, tmp_path / "cache" / "slot-0")
    with caplog.at_level(logging.WARNING):
        assert [serve(driver, prompt)[0] for _ in range(2) for prompt in prompts] == cold * 2
        driver.engine.close()
    assert sum("without it" in record.getMessage() for record in caplog.records) == 1
    assert not driver.engine.core.disk.counts()["is_on"]


def test_a_request_that_opts_out_leaves_nothing_on_disk(get_driver, tmp_path):
    """DC-4, KV-9: neither while the engine runs, under pressure, nor at its end."""
    driver = small(get_driver, tmp_path / "cache")
    for number in range(4):
        driver.add(number, make_prompt(120, seed=number), skip_prompt_log_probs=True, enable_prefix_caching=False)
        driver.run()
    assert driver.engine.core.disk.counts()["evicted"] == 0
    driver.engine.close()
    counts = driver.engine.core.disk.counts()
    assert (counts["written"], counts["left_out"], counts["blocks"], counts["snapshots"]) == (0, 0, 0, 0)


# Counts and events


@pytest.mark.parametrize("kind", ["attention_only", "hybrid"])
def test_each_skipped_token_says_where_its_entries_had_been(get_driver, tmp_path, kind):
    """DC-1: an entry put back at the start is known as such until it leaves memory."""
    prompt = make_prompt(64, seed=5)
    longer = prompt + make_prompt(64, seed=6)
    driver = started(get_driver, tmp_path / "cache", kind)
    driver.add(0, [*prompt, 1], skip_prompt_log_probs=True)
    driver.run()
    driver.engine.close()

    quiet = {"explain_prefix_cache": True, "prefix_cache_load_seconds": 0.0}  # what is evicted does not come back
    driver = started(get_driver, tmp_path / "cache", kind, block_count=16, cache=quiet)
    fill = [make_prompt(200, seed=one) for one in (7, 8)]
    for number, tokens in enumerate([[*prompt, 1], [*longer, 1], [*longer, 2], *fill, [*prompt, 1], [*prompt, 2]]):
        driver.add(number, tokens, skip_prompt_log_probs=True, num_tokens_to_generate=1)
        driver.run()
        driver.engine.check()
    records = [driver.records[number] for number in range(7)]
    assert [record.skipped_prefill_token_count for record in records] == [64, 64, 128, 0, 0, 0, 64]
    assert [record.skipped_from_disk_token_count for record in records] == [64, 64, 64, 0, 0, 0, 0]
    assert [record.prefix_cache_explanation.from_disk for record in records] == [64, 64, 64, 0, 0, 0, 0]
    counts = driver.engine.core.statistics().prefix_cache_disk()
    assert (counts["hits"], counts["skipped_tokens"]) == (3, 192)
    driver.engine.close()


@pytest.mark.parametrize("kind", ["attention_only", "hybrid"])
def test_tokens_that_the_tier_brought_back_count_as_from_disk(get_driver, tmp_path, kind):
    """EX-11: blocks that had stayed in memory do not, unless their states came from disk."""
    driver = small(get_driver, tmp_path / "cache", kind)
    prompt = make_prompt(120)
    serve(driver, prompt)
    serve(driver, make_prompt(140, seed=1))  # evicts the last blocks of the prompt, whose first ones stay
    stayed = 16 * driver.scheduler.cache.use().blocks_cached - 144 if kind == "attention_only" else 0
    _, _, skipped = serve(driver, prompt)
    assert skipped > stayed >= 0
    assert driver.records[2].skipped_from_disk_token_count == skipped - stayed
    push_out(driver)
    settle(driver)
    _, _, skipped = serve(driver, prompt)
    assert driver.records[max(driver.records)].skipped_from_disk_token_count == skipped > 0
    _, _, skipped = serve(driver, prompt)
    assert driver.records[max(driver.records)].skipped_from_disk_token_count == skipped > 0
    driver.engine.close()


def test_what_is_on_disk_is_announced(get_driver, tmp_path, monkeypatch):
    """RP-1: found at the start, written when it leaves memory and at the end, removed by a reset."""
    driver = small(get_driver, tmp_path / "cache")
    changes, disk = Changes(), driver.engine.core.disk
    disk.announce_disk(changes.disk, driver.scheduler.root_of(None))
    assert changes.take() is None
    serve(driver, make_prompt(120))
    assert changes.take() is None, "nothing was written yet"
    push_out(driver)
    settle(driver)
    blocks, states = set(), set()
    evicted = apply(changes, blocks, states)
    assert evicted.stored
    driver.engine.close()
    assert apply(changes, blocks, states).stored
    counts = disk.counts()
    assert (len(blocks), len(states)) == (counts["blocks"], counts["snapshots"])

    driver = small(get_driver, tmp_path / "cache")
    driver.engine.core.disk.announce_disk(changes.disk, driver.scheduler.root_of(None))
    assert changes.take() is None, "the same entries are there"
    later, read, read_tokens = Changes(), set(), EntryFiles.read_tokens
    monkeypatch.setattr(
        EntryFiles, "read_tokens", lambda files, entry: (read.add(entry.key.kind), read_tokens(files, entry))[1]
    )
    driver.engine.core.disk.announce_disk(later.disk, driver.scheduler.root_of(None))
    found = later.take().disk
    assert read == {EntryKind.BLOCK}, "the hash of a snapshot is enough"
    assert (set(found.stored), set(found.states_stored)) == (blocks, states)
    driver.engine.reset_prefix_cache()
    gone = later.take().disk
    assert (set(gone.removed), set(gone.states_removed)) == (blocks, states)
    driver.engine.close()


def apply(changes: Changes, blocks: set[BlockHash], states: set[BlockHash]) -> Delta:
    """Apply the changes on disk to sets of blocks and snapshots, and return them."""
    delta = changes.take().disk
    assert blocks >= delta.removed.keys()
    assert states >= delta.states_removed.keys()
    blocks.difference_update(delta.removed)
    states.difference_update(delta.states_removed)
    blocks.update(delta.stored)
    states.update(delta.states_stored)
    return delta


def corrupt(directory: Path, kind: EntryKind, depth: int) -> None:
    """Change a number in an entry's bytes, and make its checksum the one of the new bytes."""
    found = next(one for one in stored_in(directory / "slot-0") if (one.key.kind, one.depth) == (kind, depth))
    path, start = directory / "slot-0" / found.name, found.head_bytes + 20
    raw = bytearray(path.read_bytes())
    raw[start : start + 4] = struct.pack("f", 3.0 + struct.unpack("f", raw[start : start + 4])[0])
    raw[:CHECKSUM_BYTES] = zlib.crc32(found.name.encode() + raw[CHECKSUM_BYTES:]).to_bytes(CHECKSUM_BYTES, "little")
    path.write_bytes(raw)
    os.utime(path, (found.used, found.used))


def rows(directory: Path) -> set[tuple[EntryKind, int]]:
    """Kind and depth of the entries that have files."""
    return {(one.key.kind, one.depth) for one in stored_in(directory / "slot-0")}


@pytest.mark.parametrize(("kind", "depth"), [(EntryKind.BLOCK, 3), (EntryKind.SNAPSHOT, 7)])
def test_an_audit_finds_what_no_checksum_can(get_driver, tmp_path, monkeypatch, kind, depth):
    """EX-15: a file that was changed together with its checksum.

    The entry and what continues it are gone from the medium before the log names it, and a process that starts
    after that does not find them.
    """
    directory, prompt = tmp_path / "cache", make_prompt(120)
    driver = started(get_driver, directory)
    cold, *_ = serve(driver, prompt)
    serve(driver, [*prompt[:112], *make_prompt(60, seed=3)])
    driver.engine.close()
    corrupt(directory, kind, depth)

    driver = started(get_driver, directory, cache={"audit_interval": 1})
    disk, audit = driver.engine.core.disk, driver.engine.core.replicas[0].audit
    left: list[object] = []
    monkeypatch.setattr(cache_audit.logger, "error", lambda *_: left.append(rows(directory)))
    before = rows(directory)
    serve(driver, prompt)
    (finding,) = audit.findings
    assert (finding.kind, finding.position) == ("states" if kind is EntryKind.SNAPSHOT else "kv", 16 * depth)
    assert finding.is_from_disk
    wrong = {one for one in before if one[1] > depth or (one[1] == depth and one >= (kind, depth))}
    assert before - left[0] == wrong
    assert len(wrong) > 3
    assert disk.counts()["drops"]["quarantined"] >= len(wrong)
    assert finding.difference > finding.bound > 0
    disk.abandon()

    driver = started(get_driver, directory, cache={"audit_interval": 1})
    again, _, skipped = serve(driver, prompt)
    assert again == cold
    assert skipped < 16 * depth
    assert not driver.engine.core.replicas[0].audit.findings
    driver.engine.close()
