"""Counts and events of entries on disk: skipped tokens that they saved, and what audits find."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import pytest

from megatron_ext.engine import cache_audit
from megatron_ext.kv_events.changes import Changes, Delta
from megatron_ext.prefix_cache.disk.entry import CHECKSUM_BYTES, EntryKind
from megatron_ext.prefix_cache.disk.entry_files import EntryFiles
from megatron_ext.prefix_cache.hash_chain import BlockHash
from tests.unit_tests.models.test_disk_tier import push_out, serve, settle, small
from tests.unit_tests.models.test_durable_cache import started
from tests.unit_tests.prefix_cache.disk.lives import stored_in
from tests.unit_tests.support.driver import make_prompt


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
