"""Drafts of multi-token prediction in whatever befalls an engine: nothing changes, and no draft reads what is stale.

Tokens cannot show a stale draft, so the logits of each one are compared with those of the whole text.
"""

from __future__ import annotations

import random
from collections.abc import Container

import pytest
import torch

from megatron_ext.config import CacheConfig
from megatron_ext.config.in_flight import InFlight
from megatron_ext.mcore.warm_restart_setup import open_disk_cache
from megatron_ext.mcore.weight_changes import saved_tensors
from megatron_ext.ops.linear import onednn
from tests.unit_tests.mcore.test_random_lives import Life, tiny
from tests.unit_tests.support.drafters import assert_same, caching
from tests.unit_tests.support.driver import Driver, assert_logits_close, make_prompt
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.multi_token import LAYERS, MODES, Watched, build_predicting, predicting, worst_difference
from tests.unit_tests.support.oracle import Oracle
from tests.unit_tests.support.weights import writer_of

BACKEND = "onednn" if onednn.problem() is None else "auto"  # packs all, or as the table says
KINDS = list(LAYERS)


def turns(quick: set[int], count: int, long: Container[int]) -> list:
    """Kind, number of drafts and mode of each of `count` cases, in turns; those neither quick nor long are soaked."""
    found = []
    for turn in range(count):
        kind, drafts, mode = KINDS[turn % len(KINDS)], 1 + turn % 4, MODES[turn % len(MODES)]
        marks = () if turn in quick else (pytest.mark.long if turn in long else pytest.mark.soak,)
        found.append(pytest.param(turn, kind, drafts, mode, id=f"{turn}-{kind}-{drafts}-{mode}", marks=marks))
    return found


@pytest.mark.parametrize(("seed", "kind", "count", "mode"), turns({4}, 20, long=range(8)))
def test_random_lives(seed, kind, count, mode):
    """SP-11: aborts, pauses, preemptions, suspensions, failing steps, resets; few blocks, slots and tokens."""
    source = random.Random(f"mtp {seed}")
    batching = tiny(source, [8, 10, 14]) | {"max_requests": source.choice([2, 3, 4])}
    batching["max_tokens"] = max(16, batching["max_tokens"])
    driver = Watched(kind, count, mode, cache=caching(mode, source.choice([1, 3, 20])), **batching)
    Life(driver, source).live(Oracle(predicting(kind)))
    assert driver.scheduler.counters.drafted > 10
    assert worst_difference(driver) < 1e-4
    driver.drafter.check()


def talk(driver: Driver) -> None:
    """A prompt and a turn after it."""
    driver.add(0, make_prompt(21), num_tokens_to_generate=12, skip_prompt_log_probs=True)
    first = driver.run()[0]
    driver.add(1, [*first.prompt_tokens, *first.generated_tokens, 7], skip_prompt_log_probs=True)
    driver.run()


def lives_on_disk(directory, driver_of) -> list[Driver]:
    """Two engines that serve the same, of which the second finds what the first has left."""
    found = []
    for _ in range(2):
        settings = CacheConfig(
            snapshot_slots=20,
            prefix_cache_dir=str(directory),
            prefix_cache_disk_gb=0.05,
            prefix_cache_drain_seconds=9.0,
        )
        driver = driver_of(settings)
        open_disk_cache(driver.engine, [b"model"], settings, None)
        talk(driver)
        driver.engine.close()
        found.append(driver)
    return found


@pytest.mark.parametrize("kind", ["hybrid", pytest.param("attention_only", marks=pytest.mark.long)])
def test_restored_from_disk(tmp_path, kind):
    """SP-11: after a restart drafts begin with the first computed token; tokens and skipped counts are the same."""
    plain = lives_on_disk(tmp_path / "plain", lambda cache: Driver(predicting(kind), CONFIGS[kind], cache=cache))
    drafted = lives_on_disk(tmp_path / "drafted", lambda cache: Watched(kind, 3, None, cache=cache))
    for one, other in zip(drafted, plain, strict=True):
        assert_same(one, other)
        skipped = [
            [record.skipped_prefill_token_count for record in driver.records.values()] for driver in (one, other)
        ]
        assert skipped[0] == skipped[1]
        assert one.scheduler.counters.accepted > 0
        assert worst_difference(one) < 1e-4
    assert drafted[1].records[0].skipped_prefill_token_count > 0


def changed(model, part: str) -> dict[str, torch.Tensor]:
    """New weights of the trunk, or of the layer that drafts."""
    generator = torch.Generator().manual_seed(4)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(saved_tensors(model).items())
        if name.startswith("mtp.") == (part == "layer")
    }


CHANGES = [("trunk", InFlight.RECOMPUTE), ("layer", InFlight.RECOMPUTE), ("layer", InFlight.CONTINUE)]


@pytest.mark.parametrize(("part", "in_flight"), CHANGES)
@pytest.mark.parametrize(
    "kind", ["attention_only", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[:-1])]
)
def test_new_weights(kind, part, in_flight):
    """SP-11, RL-1: drafts after a change are those of the new weights alone, packed ones included."""
    plain = build_predicting(kind)
    settings = {"packs_weights": True, "operator_backend": BACKEND}
    driver = Watched(kind, 3, "kernel", build_predicting(kind), **settings)
    driver.add(0, make_prompt(21), num_tokens_to_generate=16, skip_prompt_log_probs=True)
    while len(driver.engine.get_request(0).generated_tokens) < 6:
        driver.step()
    assert driver.drafts
    assert worst_difference(driver, {0: driver.engine.get_request(0).tokens}) < 1e-4
    before = driver.engine.get_request(0).tokens[:]
    new = changed(plain, part)
    writer_of(plain).write(new, partial=True)
    writer_of(driver.model).write(new, partial=True)
    driver.engine.core.weights_changed(in_flight)
    driver.drafts.clear()
    driver.run()
    driver.model = plain
    record = driver.records[0]
    text = (*record.prompt_tokens, *record.generated_tokens)
    expected = Oracle(plain).greedy(before, len(text) - len(before))
    assert text[len(before) :] == expected.tokens
    found = torch.tensor(record.generated_log_probs[-len(expected.tokens) :])
    assert_logits_close(found, expected.log_probs, "log-probs of tokens after the change")
    assert driver.drafts
    assert worst_difference(driver, {0: text}) < 1e-4
