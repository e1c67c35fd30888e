"""Disk tier of an engine: what memory gives up goes to disk and comes back, with the tokens of a cold run."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from pathlib import Path

import pytest
import torch

from megatron_ext.config import CacheConfig
from megatron_ext.prefix_cache.disk.entry import EntryKey, EntryKind
from megatron_ext.prefix_cache.disk.entry_files import EntryFiles
from megatron_ext.prefix_cache.disk.tier import key_of
from megatron_ext.prefix_cache.disk.tier_storage import LoadEstimates
from megatron_ext.prefix_cache.hash_chain import HashChain
from megatron_ext.prefix_cache.lower_tier import CachedEntry
from tests.on_request import long_except
from tests.unit_tests.models.test_durable_cache import PATIENCE, GetDriver, change, reset, started, suspend
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
    assert driver.engine.geometry.slabs is not None
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


def test_a_snapshot_on_disk_serves_blocks_in_memory(get_driver, tmp_path):
    """EX-11: each part of a hit comes from the tier that has it."""
    driver = started(get_driver, tmp_path / "cache", cache={"snapshot_slots": 2} | PATIENT, block_count=100)
    prompt = make_prompt(120)
    tokens, *_ = serve(driver, prompt)
    _, _, in_memory = serve(driver, prompt)
    push_out(driver)
    use = driver.engine.core.statistics().use
    assert use.blocks_evicted == 0
    assert use.slots_evicted > 0
    settle(driver)  # what waits to be written is not read from the file
    read = driver.engine.core.disk.counts()["read"]
    again, _, skipped = serve(driver, prompt)
    settle(driver)
    assert (again, skipped) == (tokens, in_memory)
    assert driver.engine.core.disk.counts()["read"] == read + 1
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


def test_requests_of_one_prefix_wait_for_one_load(get_driver, tmp_path, monkeypatch):
    """EX-11."""
    driver = small(get_driver, tmp_path / "cache")
    prompt = make_prompt(120)
    serve(driver, prompt)
    push_out(driver)
    settle(driver)
    loads, slow = driver.engine.core.disk.counts()["loads"], SlowReads(monkeypatch)
    numbers = [len(driver.records), len(driver.records) + 1]
    for number in numbers:
        driver.add(number, prompt, skip_prompt_log_probs=True, num_tokens_to_generate=2)
    driver.step()
    slow.may_go_on.set()
    driver.run()
    assert [driver.records[number].skipped_prefill_token_count >= 112 for number in numbers] == [True, True]
    counts = driver.engine.core.disk.counts()
    assert (counts["loads"] - loads, counts["load_waits"]) == (1, 2)
    driver.engine.close()


class SlowReads:
    """Reads of a store's files that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        read = EntryFiles.read

        def wait_and_read(*arguments: object) -> object:
            self.has_begun.set()
            assert self.may_go_on.wait(PATIENCE)
            return read(*arguments)

        monkeypatch.setattr(EntryFiles, "read", wait_and_read)


def test_others_go_on_while_a_request_waits_for_the_disk(get_driver, tmp_path, monkeypatch):
    """EX-11: nothing that could be computed waits."""
    driver = small(get_driver, tmp_path / "cache")
    prompt = make_prompt(120)
    tokens, *_ = serve(driver, prompt)
    push_out(driver)
    settle(driver)
    slow = SlowReads(monkeypatch)
    first, other = len(driver.records), len(driver.records) + 1
    driver.add(first, prompt, skip_prompt_log_probs=True, num_tokens_to_generate=6)
    driver.add(other, make_prompt(20, seed=50), num_tokens_to_generate=3)
    while other not in driver.records:
        driver.step()
    assert first not in driver.records
    assert slow.has_begun.wait(PATIENCE)
    slow.may_go_on.set()
    driver.run()
    assert driver.records[first].generated_tokens == tokens
    assert driver.records[first].skipped_prefill_token_count > 0
    driver.engine.close()


def test_a_load_that_is_late_is_a_miss(get_driver, tmp_path, monkeypatch):
    """EX-11: the request computes its prompt, and what the disk says later changes nothing."""
    driver = small(get_driver, tmp_path / "cache", prefix_cache_load_seconds=0.05)
    prompt = make_prompt(120)
    tokens, *_ = serve(driver, prompt)
    push_out(driver)
    settle(driver)  # what waits to be written is not read from the file
    slow = SlowReads(monkeypatch)
    again, _, skipped = serve(driver, prompt)
    assert (again, skipped) == (tokens, 0)
    counts = driver.engine.core.disk.counts()
    assert (counts["loads"], counts["loads_late"], counts["loads_placed"]) == (1, 1, 0)
    slow.may_go_on.set()
    assert serve(driver, prompt)[0] == tokens
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


def test_a_quarantined_block_is_dropped_on_disk(get_driver, tmp_path):
    """EX-11, EX-15: with all that was computed from it."""
    driver = small(get_driver, tmp_path / "cache")
    prompt = make_prompt(120)
    tokens, *_ = serve(driver, prompt)
    push_out(driver)
    scheduler, tier = driver.engine.core.scheduler, driver.engine.core.disk.tier
    chain = HashChain(scheduler.root_of(None), scheduler.limits.block_size)
    hashes = chain.extend(prompt)
    wrong = {EntryKey(EntryKind.BLOCK, one) for one in hashes[3:]}
    assert all(key in tier for key in wrong)
    scheduler.quarantine(hashes[3], states_only=False)
    assert not any(key in tier for key in wrong)
    assert all(EntryKey(EntryKind.BLOCK, one) in tier for one in hashes[:3])
    again, _, skipped = serve(driver, prompt)
    assert again == tokens
    assert skipped <= 3 * scheduler.limits.block_size
    driver.engine.close()


@pytest.mark.parametrize("forget", [reset, suspend, change])
def test_a_live_tier_forgets_what_the_cache_forgets(get_driver, tmp_path, forget):
    """EX-11, DC-4: before the call returns, also what waits to be written."""
    driver = small(get_driver, tmp_path / "cache")
    prompt = make_prompt(120)
    serve(driver, prompt)
    push_out(driver)
    assert len(driver.engine.core.disk.tier) > 0
    forget(driver)
    disk = driver.engine.core.disk
    counts = disk.counts()
    assert (len(disk.tier), counts["blocks"], counts["snapshots"]) == (0, 0, 0)
    disk.abandon()
    assert stored_in(tmp_path / "cache" / "slot-0") == []


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
    """EX-11: an eviction cannot fail, and a request that waits for a load goes on."""
    driver = small(get_driver, tmp_path / "cache")
    prompt = make_prompt(120)
    tokens, *_ = serve(driver, prompt)
    push_out(driver)
    slow, disk = SlowReads(monkeypatch), driver.engine.core.disk
    number = 1000
    driver.add(number, prompt, skip_prompt_log_probs=True, num_tokens_to_generate=6)
    driver.step()
    assert driver.engine.core.scheduler.waits_for_disk(driver.engine.core.get(number))

    def fail(_: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(disk.memory, "read_block", fail)
    serve(driver, make_prompt(140, seed=7))
    slow.may_go_on.set()
    assert driver.records[number].generated_tokens == tokens
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
