"""KV-3: a shared block is never written by a later request, not even with equal values; every write is located."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.scheduling.step import ScheduledStep
from tests.unit_tests.support.caching import BLOCK, CachingDriver
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt

PROMPT = make_prompt(4 * BLOCK)
KINDS_OF_WRITES = 2 * 2  # K and V of two layers


def share(driver: CachingDriver) -> None:
    """A fully cached prompt, one whose end differs, one in chunks, one that completes a block that is cached."""
    driver.add(0, PROMPT, num_tokens_to_generate=30)
    driver.step()
    driver.step()
    driver.add(1, PROMPT)
    driver.add(2, [*PROMPT[: 2 * BLOCK + 9], *make_prompt(100, seed=1)])
    driver.add(3, PROMPT[: 3 * BLOCK], num_tokens_to_generate=20)
    driver.add(4, PROMPT, skip_prompt_log_probs=False)
    driver.run()


def test_each_write_goes_to_a_block_of_ones_own(get_caching_driver, oracle):
    """KV-3: `KvWrites` sees each operator that writes to the pool, and refuses all but these."""
    driver = get_caching_driver(max_tokens=40)
    share(driver)
    assert driver.skipped(0, 1, 2, 3, 4) == [0, 63, 32, 47, 0]
    assert driver.writes.dropped == 2 * KINDS_OF_WRITES  # the last prompt tokens of 1 and 3
    computed = sum(end - start for step in driver.steps for _, start, end in step)
    assert driver.writes.count == (computed - 2) * KINDS_OF_WRITES
    for request_id in range(5):
        assert_equals_oracle(driver, request_id, oracle)


def test_cached_blocks_do_not_change_by_a_bit(get_caching_driver):
    """KV-3: a block's bits stay as they are while the block can be found."""
    driver = get_caching_driver(max_tokens=40)
    driver.add(0, PROMPT, num_tokens_to_generate=1)
    driver.run()
    held = sorted(driver.scheduler.cache.unused)
    assert len(held) == 4
    before = driver.context.memory_buffer[:, :, held].clone()
    for request_id, prompt in enumerate([PROMPT, [*PROMPT, *make_prompt(50, seed=1)], PROMPT[:33]], start=1):
        driver.add(request_id, prompt)
    driver.run()
    assert driver.skipped(1, 2, 3) == [63, 64, 32]
    assert driver.context.memory_buffer[:, :, held].equal(before)


def test_rewriting_equal_values_is_seen(get_caching_driver):
    """Negative control: the last token of a fully cached prompt, written where it lies already; values are equal."""
    driver = get_caching_driver(max_tokens=40)
    stage = driver.context.stage

    def stage_without_sharing(message: ScheduledStep) -> None:
        stage(message)
        chunks = message.chunks
        places = [c.block_ids[p // BLOCK] * BLOCK + p % BLOCK for c in chunks for p in range(c.start, c.end)]
        step = driver.context.step
        driver.context.step = dataclasses.replace(step, slot_mapping=step.slot_mapping.new_tensor(places))

    driver.context.stage = stage_without_sharing
    with pytest.raises(AssertionError, match=r"token 63 of request 1 is written to block .*shared or cached"):
        share(driver)


def test_writes_past_the_interface_are_seen(get_caching_driver, monkeypatch):
    """Negative control: writes to the pool by another operator are seen."""
    driver = get_caching_driver()
    caches = driver.context.key_value_cache

    def write_and_read(layer_number: int) -> tuple:
        driver.context.memory_buffer[0, 0, 0, 0] += 0.0
        return caches(layer_number)

    monkeypatch.setattr(driver.context, "key_value_cache", write_and_read)
    driver.add(0, PROMPT)
    with pytest.raises(AssertionError, match="writes to the KV cache"):
        driver.step()
