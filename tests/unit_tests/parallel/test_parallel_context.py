"""MR-2, MR-3: several ranks decide, compute and answer as one does: hits, scores, ends from outside, resets."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.config import CacheConfig, ParallelConfig
from megatron_ext.config.routing import RoutingConfig
from tests.priority import TestPriority
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.parallel_contexts import (
    Lived,
    Script,
    assert_same,
    assert_same_record,
    live,
)
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.spread import Whole, whole_parameters

pytestmark = [pytest.mark.worlds, pytest.mark.priority(TestPriority.CRITICAL)]

CONFIG = dataclasses.replace(HYBRID, vocab_size=96, hybrid_override_pattern="M*-M")
LAYOUTS = {
    "TP 2": (2, ParallelConfig(tensor_model_parallel_size=2)),
    "PP 2": (2, ParallelConfig(pipeline_model_parallel_size=2)),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return make_prompt(length, seed, CONFIG.vocab_size)


COMMON = prompt(70)
SCORES = {"return_log_probs": True, "top_n_logprobs": 2}
SCRIPT = Script(
    actions=[
        ("add", 0, COMMON, {"num_tokens_to_generate": 6}),
        ("add", 1, COMMON[:50] + prompt(30, 1), {"num_tokens_to_generate": 4, "temperature": 1.0, "seed": 7}),
        ("steps", 3),
        ("add", 2, COMMON + prompt(9, 2), {"num_tokens_to_generate": 5, **SCORES}),
        ("add", 3, COMMON + prompt(11, 3), {"num_tokens_to_generate": 9, "skip_prompt_log_probs": True, **SCORES}),
        ("steps", 4),
        ("abort", 3),
        ("add", 4, COMMON + prompt(20, 4), {"num_tokens_to_generate": 20, "stop_words": ("<66><32>",)}),
        ("steps", 4),
        ("suspend",),
        ("add", 5, prompt(150, 5), {"num_tokens_to_generate": 3, "temperature": 0.7, "top_k": 20}),
        ("steps", 2),
        ("reset",),
        ("add", 6, COMMON, {"num_tokens_to_generate": 3}),
        ("steps", 3),
        ("weights",),
        ("add", 7, COMMON, {"num_tokens_to_generate": 3}),
        ("add", 8, COMMON, {"num_tokens_to_generate": 3}),
    ],
    batching={"block_count": 24, "max_tokens": 48},
    cache=CacheConfig(snapshot_slots=4),
)


@pytest.fixture(scope="module")
def whole() -> Whole:
    return whole_parameters(build_slow_decay(CONFIG))


@pytest.fixture(scope="module")
def alone(whole: Whole) -> Lived:
    return live(None, CONFIG, whole, SCRIPT)


def test_the_life_has_everything_in_it(alone: Lived):
    assert alone.counters.hits > 2
    assert alone.statistics["snapshots_taken"] > 3
    assert {record.status.name for record in alone.records.values()} == {"COMPLETED", "ABORTED"}
    assert "stop" in {record.finish_reason for record in alone.records.values()}


@pytest.mark.worlds(smoke=True)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_on_one_rank(layout: str, whole: Whole, alone: Lived):
    size, parallel = LAYOUTS[layout]
    first, *others = run_ranks(live, size, parallel, CONFIG, whole, SCRIPT)
    assert_same(first, alone)
    for other in others:
        assert other.counters == first.counters
        assert other.steps == first.steps
        assert other.geometry == first.geometry


@pytest.mark.worlds(smoke=True)
def test_replicas_answer_as_one_rank_with_their_requests(whole: Whole):
    """Round robin sends request i to replica i mod 2; counts are those of both."""
    actions = [("add", i, COMMON[: 40 + 5 * i] + prompt(8, i), {"num_tokens_to_generate": 5}) for i in range(5)]
    parts = []
    for replica in range(2):
        own = [action for action in actions if action[1] % 2 == replica]
        parts.append(live(None, CONFIG, whole, dataclasses.replace(SCRIPT, actions=own)))
    script = dataclasses.replace(SCRIPT, actions=actions, routing=RoutingConfig("round_robin"))
    first, _ = run_ranks(live, 2, ParallelConfig(), CONFIG, whole, script)
    assert sorted(first.records) == list(range(5))
    for part in parts:
        for name, record in part.records.items():
            assert_same_record(first.records[name], record)
    assert first.statistics == {
        name: parts[0].statistics[name] + parts[1].statistics[name] for name in first.statistics
    }


@pytest.mark.worlds(smoke=True)
def test_replicas_skip_what_one_rank_does(whole: Whole):
    """KV-7: prompts behind two prefixes, in pairs, one a step: each prefix is computed on one replica."""
    prefixes = prompt(64, 100), prompt(64, 101)
    actions = []
    for i, name in enumerate((0, 0, 1, 1) * 2):
        actions += [("add", i, prefixes[name] + prompt(8, i), {"num_tokens_to_generate": 3}), ("steps", 2)]
    script = dataclasses.replace(SCRIPT, actions=actions, batching={"block_count": 24})
    first, _ = run_ranks(live, 2, ParallelConfig(), CONFIG, whole, script)
    assert first.counters.skipped_tokens == live(None, CONFIG, whole, script).counters.skipped_tokens == 6 * 64


def test_a_stage_without_states_has_no_say(whole: Whole):
    """Automatic numbers: the first stage has no attention, the second one no recurrent layers."""
    config = dataclasses.replace(CONFIG, hybrid_override_pattern="MM**")
    parameters = whole_parameters(build_slow_decay(config))
    actions = [("add", 0, COMMON, {"num_tokens_to_generate": 3}), ("steps", 20), ("add", 1, COMMON, {})]
    script = Script(actions, {"block_count": None, "buffer_size_gb": 0.005, "max_requests": 4})
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    first, second = run_ranks(live, 2, parallel, config, parameters, script)
    assert first.records[1].skipped_prefill_token_count == 64
    assert second.counters == first.counters
    states, attention = first.geometry.ranks
    assert (states.block_bytes, attention.state_bytes) == (0, 0)
    assert first.geometry.block_bytes == attention.block_bytes > 0
    assert first.geometry.state_bytes == states.state_bytes > 0
    assert first.geometry.world_pool_bytes == states.pool_bytes + attention.pool_bytes
