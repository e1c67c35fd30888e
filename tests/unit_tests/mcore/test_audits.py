"""EX-15: hits that are computed once more without the cache, and what happens to entries that were wrong."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from megatron_ext.config import CacheConfig
from megatron_ext.engine import cache_audit
from megatron_ext.engine.cache_audit import MAX_DUE, AuditCounts, CacheAudit
from megatron_ext.memory import budget
from megatron_ext.prefix_cache.hash_chain import hash_blocks, packed_tokens
from tests.on_request import long_except
from tests.unit_tests.mcore.test_random_lives import Life, seeds
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt

BLOCK = 16
KINDS = ("hybrid", "attention_only", "attention_free", "gated_delta_net", "mamba1")
EACH = CacheConfig(audit_interval=1)
PROMPT = make_prompt(100, seed=4)


def audit_of(driver: Driver) -> CacheAudit:
    return driver.engine.core.replicas[0].audit


def serve(driver: Driver, prompt: list[int], **params: object) -> int:
    """Serve one request and all audits that are due; return its id."""
    name = len(driver.records)
    driver.add(name, prompt, **({"num_tokens_to_generate": 4, "skip_prompt_log_probs": True} | params))
    driver.run()
    return name


def assert_complete(counts: AuditCounts) -> None:
    left_out = counts.left_out_busy + counts.left_out_evicted + counts.left_out_memory
    assert counts.due == counts.completed + left_out + counts.wrong_blocks + counts.wrong_snapshots


SOUND = [("hybrid", True), ("attention_only", False), ("gated_delta_net", True), ("mamba1", False)]


@pytest.mark.parametrize(("kind", "shares"), long_except(SOUND, itertools.product(KINDS, (False, True))))
def test_a_sound_cache(get_driver, get_oracle, monkeypatch, kind: str, *, shares: bool):
    """Every hit is audited, K/V and states are compared, and nothing is found; the requests know nothing of it."""
    monkeypatch.setattr(budget, "SHARES_MEMORY", shares)
    memory = {"block_count": None, "buffer_size_gb": 0.01} if shares else {}
    slots = None if shares or kind == "attention_only" else 20
    driver = get_driver(kind, cache=CacheConfig(audit_interval=1, snapshot_slots=slots), max_tokens=40, **memory)
    for length in (100, 90, 100, 70):
        serve(driver, [*PROMPT[:length], *make_prompt(length // 3, seed=length)])
    counts = audit_of(driver).counts
    hits = [one for one in driver.records.values() if one.skipped_prefill_token_count]
    assert counts.due == counts.completed == len(hits) >= 2
    layers = driver.context.plan.shape
    assert counts.blocks == sum(one.matched_block_count for one in hits)
    assert counts.snapshots == (0 if layers.states is None else len(hits))
    assert not audit_of(driver).findings
    statistics = driver.engine.core.statistics()
    assert statistics.audit.tokens == BLOCK * counts.blocks
    assert (statistics.ended, statistics.running, statistics.waiting) == (4, 0, 0)
    for name in driver.records:
        assert_equals_oracle(driver, name, get_oracle(kind))


def cached_block(driver: Driver, index: int) -> int:
    """Place of a cached block of `PROMPT`."""
    hashes = hash_blocks(driver.scheduler.root_of(None), packed_tokens(PROMPT), driver.scheduler.limits.block_size)
    return driver.scheduler.cache.match(hashes)[index]


def snapshot_slot(driver: Driver, blocks: int) -> int:
    """Slot of the snapshot after so many blocks."""
    cache = driver.scheduler.cache
    (found,) = [one for one in cache.states.visible() if cache.depth_of(one) == blocks]
    return cache.states.find(found)


@pytest.mark.parametrize(
    ("kind", "index", "value"),
    [
        (kind, index, (3.0, torch.nan)[(i + j) % 2])
        for i, kind in enumerate(KINDS[:2])
        for j, index in enumerate((0, 2, 5))
    ],
)
def test_a_wrong_block(get_driver, get_oracle, kind: str, index: int, value: float, caplog):
    """The block and all that continues it are dropped, no block before it; later requests are right again."""
    driver = get_driver(kind, cache=EACH)
    serve(driver, PROMPT)
    block = cached_block(driver, index)
    driver.context.memory_buffer[1, -1, block, 3, 0, 1] += value
    serve(driver, [*PROMPT[: BLOCK * 6], *make_prompt(20, seed=8)])
    (finding,) = audit_of(driver).findings
    assert (finding.kind, finding.position) == ("kv", BLOCK * (index + 1))
    assert finding.difference > finding.bound
    assert driver.engine.core.statistics().audit_findings == (finding,)
    assert audit_of(driver).counts.wrong_blocks == 1
    assert sum("an audit of the prefix cache found" in one.getMessage() for one in caplog.records) == 1
    matched = serve(driver, PROMPT)
    assert driver.records[matched].matched_block_count == index
    assert_equals_oracle(driver, matched, get_oracle(kind))
    assert_equals_oracle(driver, serve(driver, PROMPT), get_oracle(kind))
    assert len(audit_of(driver).findings) == 1
    assert_complete(audit_of(driver).counts)


@pytest.mark.parametrize("kind", ["hybrid", "attention_free", "mamba1"])
@pytest.mark.parametrize("part", ["conv", "ssm"])
def test_a_wrong_snapshot(get_driver, get_oracle, kind: str, part: str):
    """The snapshot and what was computed from it are dropped; the blocks before it stay."""
    driver = get_driver(kind, cache=EACH)
    serve(driver, PROMPT)
    getattr(driver.context.allocated.snapshots, part)[0, snapshot_slot(driver, 6)].view(-1)[2] += 3.0
    serve(driver, [*PROMPT, *make_prompt(40, seed=8)])  # publishes blocks that were computed from wrong states
    (finding,) = audit_of(driver).findings
    assert (finding.kind, finding.position) == ("states", BLOCK * 6)
    assert finding.dropped_blocks == 2
    later = serve(driver, [*PROMPT, *make_prompt(40, seed=8)])
    assert driver.records[later].matched_block_count == 6
    assert driver.records[later].skipped_prefill_token_count < BLOCK * 6
    assert_equals_oracle(driver, later, get_oracle(kind))
    assert_equals_oracle(driver, serve(driver, [*PROMPT, *make_prompt(40, seed=8)]), get_oracle(kind))
    assert len(audit_of(driver).findings) == 1


@pytest.fixture
def any_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits may compute as many tokens as they like beside other requests."""
    monkeypatch.setattr(cache_audit, "AUDIT_SHARE", 1e9)


@pytest.mark.usefixtures("any_share")
@pytest.mark.parametrize("entry", ["block", "snapshot"])
def test_living_requests_start_again(get_driver, get_oracle, entry: str):
    """A request that still runs on a wrong entry is preempted; what it publishes afterwards is right."""
    driver = get_driver("hybrid", cache=EACH)
    serve(driver, PROMPT)
    if entry == "block":
        driver.context.memory_buffer[0, 0, cached_block(driver, 1), 0, 0, 0] += 3.0
    else:
        driver.context.allocated.snapshots.ssm[:, snapshot_slot(driver, 6)] += 3.0
    name = serve(driver, [*PROMPT, *make_prompt(3, seed=8)], num_tokens_to_generate=60)  # no new block at first
    assert driver.records[name].recomputed_token_count > 0
    assert len(audit_of(driver).findings) == 1
    turn = [*driver.records[name].prompt_tokens, *driver.records[name].generated_tokens, 5]
    later = serve(driver, turn)
    assert driver.records[later].skipped_prefill_token_count > 112
    assert_equals_oracle(driver, later, get_oracle("hybrid"))


class TestTime:
    def test_not_beside_others(self, get_driver):
        """An audit waits until no other request lives; those for which too many wait are left out and counted."""
        driver = get_driver("attention_only", cache=EACH)
        serve(driver, PROMPT)
        driver.add(1, make_prompt(40, seed=1), num_tokens_to_generate=3 * MAX_DUE)
        for name in range(2, MAX_DUE + 12):
            driver.add(name, PROMPT, num_tokens_to_generate=1, skip_prompt_log_probs=True)
            driver.step()
            driver.step()
        counts = audit_of(driver).counts
        assert (counts.due, counts.completed, counts.left_out_busy) == (MAX_DUE + 10, 0, 10)
        driver.run()
        assert (counts.completed, counts.left_out_busy) == (MAX_DUE, 10)

    @pytest.mark.usefixtures("any_share")
    def test_within_the_share(self, get_driver):
        """Negative control of `test_not_beside_others`."""
        driver = get_driver("attention_only", cache=EACH)
        serve(driver, PROMPT)
        driver.add(1, make_prompt(40, seed=1), num_tokens_to_generate=100)
        for name in (2, 3, 4):
            driver.add(name, PROMPT, num_tokens_to_generate=1, skip_prompt_log_probs=True)
            driver.step()
            driver.step()
        driver.step()
        assert audit_of(driver).counts.completed == 3
        assert 1 not in driver.records
        driver.run()


@pytest.mark.usefixtures("any_share")
@pytest.mark.parametrize("seed", seeds([0, 1], 9))
def test_random_lives(get_driver, get_oracle, seed: int):
    """Audits among aborts, failures, suspensions and resets find nothing, and change nothing of the requests."""
    source = random.Random(f"audits {seed}")
    kind = KINDS[seed % len(KINDS)]
    requests = source.choice([2, 3, 4])
    driver = get_driver(
        kind,
        cache=CacheConfig(
            audit_interval=source.choice([1, 2]),
            snapshot_mode=source.choice(["kernel", "align"]),
            eviction_policy=source.choice(["lru", "ref_zero"]),
            snapshot_slots=None if kind == "attention_only" else source.choice([2, 5, 20]),
        ),
        block_count=source.choice([10, 14, 20]),
        max_requests=requests,
        max_tokens=requests + source.choice([14, 20, 40]),
    )
    life = Life(driver, source)
    for _ in range(4):
        life.live(get_oracle(kind))
        if audit_of(driver).counts.completed:
            break
    assert audit_of(driver).counts.due > 0
    assert not audit_of(driver).findings
    assert_complete(audit_of(driver).counts)
