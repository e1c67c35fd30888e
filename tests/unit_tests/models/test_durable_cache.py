"""Warm restart: an engine finds what another one left in a directory, and what must be forgotten is forgotten there."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from megatron_ext import load_engine
from megatron_ext.config import CacheConfig, RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.kv_events.changes import Changes
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.mcore.warm_restart_setup import open_disk_cache
from megatron_ext.models.identity import cache_facts, weights_digest
from megatron_ext.models.load import LoadedModel
from megatron_ext.prefix_cache.disk.announcing import announce
from megatron_ext.prefix_cache.disk.slot import take_slot
from megatron_ext.text.tokenizer import NullTokenizer
from tests.forked import fork
from tests.on_request import long_except
from tests.unit_tests.support.driver import Driver, make_prompt

PATIENCE = 300  # seconds
ARENA = {"block_count": None, "buffer_size_gb": 0.01}
FIXED = {"block_count": 100}
TEXT = "The import statement loads a module, which is a file of definitions. " * 12

GetDriver = Callable[..., Driver]


def started(
    get_driver: GetDriver, directory: Path, kind: str = "hybrid", *, cache: dict[str, object] | None = None, **batching
) -> Driver:
    """An engine with its cache in a directory, as a start of the process makes it."""
    settings = CacheConfig(prefix_cache_dir=str(directory), **({"prefix_cache_disk_gb": 0.05} | (cache or {})))
    driver = get_driver(kind, cache=settings, **(FIXED | batching))
    model = driver.engine.controller.inference_wrapped_model.model
    tokenizer = NullTokenizer(97)
    loaded = LoadedModel(model, None, tokenizer, torch.float32, "test")  # its configuration is in the engine's plan
    open_disk_cache(driver.engine, cache_facts(loaded, weights_digest(model)), settings)
    driver.engine.check()
    return driver


def prompts() -> list[list[int]]:
    """Prompts of which two begin with 70 tokens of the first."""
    first, others = make_prompt(130), make_prompt(90, seed=1)
    return [first, first[:70] + others, first[:70] + others[::-1], make_prompt(47, seed=2)]


def served(driver: Driver) -> tuple[list[tuple[int, ...]], list[float], list[int]]:
    """Serve the prompts one after the other; their tokens, log-probs and skipped counts."""
    first = len(driver.records)
    for number, prompt in enumerate(prompts(), first):
        driver.add(number, prompt, skip_prompt_log_probs=True, num_tokens_to_generate=8)
        driver.run()
    records = [driver.records[number] for number in range(first, len(driver.records))]
    log_probs = [value for record in records for value in record.generated_log_probs]
    return (
        [record.generated_tokens for record in records],
        log_probs,
        [record.skipped_prefill_token_count for record in records],
    )


QUICK = [("hybrid", False), ("hybrid", True), ("attention_only", False), ("attention_free", False)]
MORE = [("mamba1", False), ("gated_delta_net", True), ("short_conv", True), ("side_by_side", False)]


@pytest.mark.parametrize(("kind", "is_shared"), long_except(QUICK, QUICK + MORE))
def test_a_restart_finds_what_was_cached(get_driver, tmp_path, kind, is_shared):
    """DC-1: the first requests after a restart skip what the last ones before it skipped."""
    cache = {"snapshot_slots": None if is_shared else 40}
    memory = ARENA if is_shared else FIXED
    driver = started(get_driver, tmp_path / "cache", kind, cache=cache, **memory)
    tokens, log_probs, _ = served(driver)
    *_, skipped = served(driver)
    assert all(skipped)
    cached = driver.engine.core.statistics().use.blocks_cached
    driver.engine.close()
    assert driver.engine.core.statistics().use.blocks_cached == cached

    driver = started(get_driver, tmp_path / "cache", kind, cache=cache, **memory)
    assert driver.engine.core.statistics().use.blocks_cached == cached
    assert driver.engine.core.statistics().use.snapshots_taken == 0
    again, log_probs_again, skipped_again = served(driver)
    assert skipped_again == skipped
    assert again == tokens
    torch.testing.assert_close(torch.tensor(log_probs_again), torch.tensor(log_probs), atol=2e-4, rtol=0)
    counts = driver.engine.core.disk.counts()
    assert counts["loaded"] == counts["read"] > 0
    assert counts["written"] == 0
    driver.engine.close()
    assert driver.engine.core.disk.counts()["left_out"] == 0


def test_entries_fit_the_other_layout_of_memory(get_driver, tmp_path):
    """DC-1: entries do not depend on whether blocks and snapshots share memory."""
    driver = started(get_driver, tmp_path / "cache", **ARENA)
    assert driver.engine.plan.world.slabs is not None
    tokens, _, _ = served(driver)
    driver.engine.close()
    driver = started(get_driver, tmp_path / "cache", **FIXED)
    assert driver.engine.plan.world.slabs is None
    again, _, skipped = served(driver)
    assert all(skipped)
    assert again == tokens
    driver.engine.close()


def test_a_small_memory_takes_what_is_worth_most(get_driver, tmp_path):
    """DC-1: nothing is evicted for it, and the rest stays on disk."""
    driver = started(get_driver, tmp_path / "cache", "attention_only")
    served(driver)
    hottest = make_prompt(64, seed=9)
    driver.add(50, hottest, skip_prompt_log_probs=True)
    driver.run()
    driver.engine.close()
    stored = driver.engine.core.disk.counts()["blocks"]
    driver = started(get_driver, tmp_path / "cache", "attention_only", block_count=6)
    counts = driver.engine.core.disk.counts()
    assert (counts["loaded"], counts["blocks"]) == (6, stored)
    assert driver.engine.core.statistics().use.blocks_evicted == 0
    driver.add(0, hottest, skip_prompt_log_probs=True, num_tokens_to_generate=1)
    driver.run()
    assert driver.records[0].skipped_prefill_token_count == 63
    driver.engine.close()
    assert driver.engine.core.disk.counts()["blocks"] == stored


@pytest.mark.parametrize("change", ["weights", "tokenizer", "block_size", "ssm_states_dtype"])
def test_another_identity_finds_nothing(get_driver, tmp_path, caplog, change):
    """DC-2."""
    driver = started(get_driver, tmp_path / "cache")
    engine, model = driver.engine, driver.engine.controller.inference_wrapped_model.model
    loaded = LoadedModel(model, None, NullTokenizer(97), torch.float32, "test")
    weights = weights_digest(model)
    served(driver)
    engine.close()
    batching = {"block_size": 32} if change == "block_size" else {}
    batching |= {"ssm_states_dtype": "bf16"} if change == "ssm_states_dtype" else {}
    settings = CacheConfig(prefix_cache_dir=str(tmp_path / "cache"), prefix_cache_disk_gb=0.05)
    other = get_driver("hybrid", cache=settings, **(FIXED | batching))
    if change == "tokenizer":
        loaded = dataclasses.replace(loaded, tokenizer=NullTokenizer(98))
    if change == "weights":
        parameter = next(model.parameters())
        with torch.no_grad():
            parameter.flatten()[5] += 1
            weights = weights_digest(model)
            parameter.flatten()[5] -= 1
        assert weights != weights_digest(model)
    with caplog.at_level(logging.WARNING):
        open_disk_cache(other.engine, cache_facts(loaded, weights), settings)
    assert sum("another model" in record.getMessage() for record in caplog.records) == 1
    counts = other.engine.core.disk.counts()
    assert (counts["loaded"], counts["blocks"]) == (0, 0)
    assert counts["other_entries"] > 10
    other.engine.core.disk.abandon()


def reset(driver: Driver) -> None:
    driver.engine.reset_prefix_cache()


def suspend(driver: Driver) -> None:
    driver.engine.suspend()


def change(driver: Driver) -> None:
    driver.engine.weights_changed()


@pytest.mark.parametrize("forget", [reset, suspend, change])
def test_what_the_cache_forgets_is_forgotten_on_disk(get_driver, tmp_path, forget):
    """DC-4."""
    driver = started(get_driver, tmp_path / "cache")
    served(driver)
    driver.engine.close()
    driver = started(get_driver, tmp_path / "cache")
    assert driver.engine.core.disk.counts()["blocks"] > 0
    forget(driver)
    assert driver.engine.core.disk.counts()["blocks"] == 0
    driver.engine.core.disk.abandon()
    driver = started(get_driver, tmp_path / "cache")
    assert driver.engine.core.disk.counts()["loaded"] == 0
    driver.engine.close()


def test_what_is_written_first_can_be_used_without_the_rest(get_driver, tmp_path):
    """DC-1: a second signal ends the writing anywhere."""
    driver = started(get_driver, tmp_path / "cache")
    served(driver)
    disk = driver.engine.core.disk
    read, written = disk.memory.read_snapshot, []

    def read_and_stop(slot: int) -> Sequence[object]:
        disk.stop()
        written.append(slot)
        return read(slot)

    disk.memory.read_snapshot = read_and_stop
    driver.engine.close()
    counts = disk.counts()
    assert counts["snapshots"] == len(written) == 1
    assert counts["left_out"] > 0
    driver = started(get_driver, tmp_path / "cache")
    assert driver.engine.core.disk.counts()["loaded"] == counts["written"]
    _, _, skipped = served(driver)
    assert any(skipped)
    driver.engine.close()


def test_a_reset_of_the_engine_keeps_what_is_worth_keeping(get_driver, tmp_path):
    """DC-1: memory begins empty, and the next start finds what was cached before and after."""
    driver = started(get_driver, tmp_path / "cache")
    tokens, _, _ = served(driver)
    driver.engine.reset()
    driver.records.clear()
    assert driver.engine.core.statistics().use.blocks_cached == 0
    kept = driver.engine.core.disk.counts()["blocks"]
    assert kept > 0
    other = make_prompt(70, seed=7)
    driver.add(40, other, skip_prompt_log_probs=True)
    driver.run()
    driver.engine.close()
    assert driver.engine.core.disk.counts()["blocks"] > kept
    driver = started(get_driver, tmp_path / "cache")
    again, _, skipped = served(driver)
    assert (again, all(skipped)) == (tokens, True)
    driver.add(40, other, skip_prompt_log_probs=True)
    driver.run()
    assert driver.records[40].skipped_prefill_token_count >= 64
    driver.engine.close()


def test_an_end_that_fails_gives_the_slot_up(get_driver, tmp_path, monkeypatch):
    """DC-4: an error while the cache is written costs what was not written, and the next engine has the slot."""
    driver = started(get_driver, tmp_path / "cache")
    served(driver)
    disk = driver.engine.core.disk

    def fail(block: int) -> Sequence[object]:
        raise RuntimeError("an error of the device")

    monkeypatch.setattr(disk.memory, "read_block", fail)
    driver.engine.close()
    assert driver.engine.core.error_isolation.count == 1
    slot = take_slot(tmp_path / "cache")
    assert slot.path.name == "slot-0"
    slot.close()


def test_a_directory_that_cannot_be_used_is_an_error_unless_it_is_optional(get_driver, tmp_path, caplog):
    """DC-3: one line."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory; give another, or --prefix-cache-dir-optional to go on"):
        started(get_driver, tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING):
        driver = started(get_driver, tmp_path / "file" / "cache", cache={"prefix_cache_dir_optional": True})
    assert ["without it" in record.getMessage() for record in caplog.records] == [True]
    assert driver.engine.core.disk is None
    served(driver)
    driver.engine.close()


def generate(settings: dict[str, object], answers: str) -> None:
    """Serve one prompt with the embedded model, and leave tokens and counts in a file."""
    with load_engine(buffer_size_gb=0.05, **settings) as engine:
        params = RequestParams(num_tokens_to_generate=12, return_log_probs=True, skip_prompt_log_probs=True)
        (record,) = engine.generate(TEXT, params)
        disk = engine.inference_engine.core.disk
    found = {
        "tokens": record.generated_tokens,
        "log_probs": record.generated_log_probs,
        "skipped": record.skipped_prefill_token_count,
        "disk": None if disk is None else disk.counts(),
    }
    Path(answers).write_text(json.dumps(found))


def in_a_process(tmp_path: Path, **settings: object) -> dict:
    answers = tmp_path / "answers.json"
    answers.unlink(missing_ok=True)
    process = fork(generate, settings, str(answers))
    process.join()
    assert process.exitcode == 0
    return json.loads(answers.read_text())


def test_processes_one_after_the_other(tmp_path):
    """DC-1: in a new process the first request skips what a second one would have skipped."""
    directory = str(tmp_path / "cache")
    cold = in_a_process(tmp_path, prefix_cache_dir=directory)
    warm = in_a_process(tmp_path, prefix_cache_dir=directory)
    off = in_a_process(tmp_path, prefix_cache_dir=str(tmp_path / "none"), enable_prefix_caching=False)
    assert (cold["skipped"], off["skipped"], off["disk"]) == (0, 0, None)
    assert warm["skipped"] >= 128
    assert warm["skipped"] % 64 == 0
    assert warm["tokens"] == cold["tokens"] == off["tokens"]
    torch.testing.assert_close(torch.tensor(warm["log_probs"]), torch.tensor(cold["log_probs"]), atol=2e-4, rtol=0)
    assert not (tmp_path / "none").exists()


def test_what_was_put_back_is_announced(get_driver, tmp_path):
    """DC-1: KV events have it like blocks of this process; a salt from before the restart stays unknown."""
    driver = started(get_driver, tmp_path / "cache")
    for number, salt in enumerate((None, None, "tenant")):
        driver.add(number, make_prompt(60, seed=number // 2), skip_prompt_log_probs=True, cache_salt=salt)
        driver.run()
    driver.engine.close()
    driver = started(get_driver, tmp_path / "cache")
    changes, scheduler = Changes(), driver.engine.core.scheduler
    scheduler.cache.observers.append(changes)
    announce(scheduler.cache, changes, scheduler.root_of(None))
    delta = changes.take()
    assert set(delta.stored) == set(scheduler.cache.index.block_hashes())
    assert set(delta.states_stored) == set(scheduler.cache.states.visible())
    firsts = [block for block in delta.stored.values() if block.parent is None]
    assert sorted(list(block.tokens) for block in firsts) == sorted(make_prompt(60, seed=one)[:16] for one in (0, 1))
    assert [block.salt is None for block in firsts].count(True) == 1
    mirror = Mirror(16, has_states=True)
    mirror.apply(delta)
    driver.add(0, make_prompt(60) + [1] * 40, skip_prompt_log_probs=True)
    driver.run()
    assert mirror.apply(changes.take()).blocks
    driver.engine.close()
