"""Engines whose blocks and snapshots share an arena: requests end with the oracle's outputs while the border moves.

Slabs that change their type are full of NaN, as is whatever was freed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest

from megatron_ext.config import CacheConfig
from megatron_ext.memory import budget, capacity
from megatron_ext.memory.arena import ArenaBudget, plan_slabs
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from tests.unit_tests.mcore.test_random_lives import Life, life_with_drafts, seeds
from tests.unit_tests.support.drafters import any_token, right_for_a_while
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.padded import PaddedDriver

KINDS = ("hybrid", "gated_delta_net", "mamba1")


@pytest.fixture(autouse=True)
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SHARES_MEMORY", True)


@pytest.fixture
def few_slabs(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that limits the arenas of later engines to so many slabs."""

    def limit(slabs: int) -> None:
        def plan_few(ranks: Sequence[ArenaBudget]) -> SlabLayout:
            layout = plan_slabs(ranks)
            assert layout.slabs > slabs
            return dataclasses.replace(layout, slabs=slabs)

        monkeypatch.setattr(capacity, "plan_slabs", plan_few)

    return limit


ARENA = {"block_count": None, "buffer_size_gb": 0.01}


def tiny(source: random.Random) -> dict[str, object]:
    """Limits that requests soon reach."""
    requests = source.choice([2, 3, 4])
    return ARENA | {
        "max_requests": requests,
        "max_tokens": requests + source.choice([14, 20, 40]),
        "paused_buffer_size_gb": source.choice([None, None, 0]),
    }


def cache_of(source: random.Random) -> CacheConfig:
    return CacheConfig(
        eviction_policy=source.choice(["lru", "ref_zero"]),
        snapshot_mode=source.choice(["kernel", "align"]),
        prefix_cache_log_probs=True,
    )


def live_on(life: Life, oracle: Oracle) -> None:
    """Live until the border has moved."""
    for _ in range(4):
        life.live(oracle)
        if life.driver.retyped_slabs:
            break
    assert_moved(life.driver)


def assert_moved(driver: Driver) -> None:
    use = driver.scheduler.cache.use()
    assert use.slabs_total == driver.context.plan.geometry.slabs.slabs
    assert use.slabs_retyped > 0, "the border did not move"
    assert driver.retyped_slabs > 0


@pytest.mark.parametrize("seed", seeds([0], 9))
def test_random_lives(get_driver, get_oracle, few_slabs, seed: int):
    """HY-2 to HY-6, EX-1 to EX-5, EX-8, KV-3."""
    source, kind = random.Random(f"arena {seed}"), KINDS[seed % 3]
    few_slabs(source.choice([3, 4, 5]))
    driver = get_driver(kind, cache=cache_of(source), **tiny(source))
    live_on(Life(driver, source), get_oracle(kind))


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds([0], 6))
def test_random_lives_with_drafts(get_driver, get_oracle, few_slabs, seed: int):
    """SP-3, SP-5: states after drafts become snapshots by a copy into the arena."""
    source, kind = random.Random(f"arena and drafts {seed}"), KINDS[seed % 3]
    few_slabs(source.choice([3, 4, 5]))
    settings = tiny(source) | {"max_tokens": 40}
    life = life_with_drafts(
        get_driver,
        get_oracle(kind),
        kind,
        source,
        [right_for_a_while, any_token][seed % 2],
        cache=cache_of(source),
        speculative_tokens=source.choice([1, 3]),
        **settings,
    )
    live_on(life, get_oracle(kind))


@pytest.mark.parametrize("seed", seeds([0], 6))
def test_random_lives_of_captured_steps(get_oracle, few_slabs, seed: int):
    """CU-6: padded steps, and steps that are launched ahead, whose states are named and copied later."""
    source, kind = random.Random(f"arena and graphs {seed}"), KINDS[seed % 3]
    few_slabs(source.choice([3, 4, 5]))
    driver = PaddedDriver(get_oracle(kind).model, CONFIGS[kind], cache=cache_of(source), **tiny(source))
    live_on(Life(driver, source), get_oracle(kind))


def serve(driver: Driver, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Serve prompts one after the other; return the tokens that each skipped."""
    for prompt in prompts:
        name = len(driver.records)
        driver.add(name, prompt, num_tokens_to_generate=2, skip_prompt_log_probs=True)
        driver.run()
    return [driver.records[name].skipped_prefill_token_count for name in range(len(driver.records))]


def test_the_border_moves_both_ways(get_driver, get_oracle, few_slabs):
    """One long prompt takes nearly all slabs for its blocks; many short ones then take slabs for their snapshots."""
    few_slabs(8)
    driver = get_driver(cache=CacheConfig(), **ARENA, max_requests=2, max_sequence_length=512)
    layout = driver.context.plan.geometry.slabs
    long = make_prompt(layout.blocks * 16 - 40, seed=9)
    short = [make_prompt(33, seed) for seed in range(layout.slabs)]
    serve(driver, [long])
    use = driver.scheduler.cache.use()
    assert use.slabs_of_blocks >= layout.slabs - 1
    serve(driver, short)
    later = driver.scheduler.cache.use()
    assert later.slabs_of_snapshots > use.slabs_of_snapshots
    serve(driver, [long])
    assert driver.scheduler.cache.use().slabs_of_blocks > later.slabs_of_blocks
    assert_moved(driver)
    for name in driver.records:
        assert_equals_oracle(driver, name, get_oracle("hybrid"))
