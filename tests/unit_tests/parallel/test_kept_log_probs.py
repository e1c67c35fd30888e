"""RL-10: several ranks keep prompt log-probs with their blocks as one rank does; the last stage has them."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.config import CacheConfig, ParallelConfig
from tests.priority import TestPriority
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Lived, Script, assert_close, assert_same
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import PROMPT_SCORES, everything, live_poisoned, with_vocabulary
from tests.unit_tests.support.spread import whole_parameters

pytestmark = [pytest.mark.worlds, pytest.mark.priority(TestPriority.HIGH)]

CONFIG = with_vocabulary(CONFIGS["hybrid"])
SIZES = {
    "TP 2": ParallelConfig(tensor_model_parallel_size=2),
    "PP 2": ParallelConfig(pipeline_model_parallel_size=2),
}


def scored(**cache: object) -> Script:
    """The whole life, in which all requests ask for their prompts' own log-probs."""
    script = everything("kernel")
    actions = [
        (*action[:3], action[3] | PROMPT_SCORES | {"top_n_logprobs": 0}) if action[0] == "add" else action
        for action in script.actions
    ]
    return dataclasses.replace(script, actions=actions, cache=CacheConfig(snapshot_slots=4, **cache))


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks(sizes: str):
    """RL-10, MR-3: log-probs, hits and reasons of each request are those of one rank; log-probs those without hits."""
    script, whole = scored(prefix_cache_log_probs=True), whole_parameters(build_slow_decay(CONFIG))
    alone, computed = live_poisoned(None, CONFIG, whole, [script, scored()])
    assert alone.statistics["hits"] >= 4
    assert computed.statistics["hits"] == 0
    assert_same_scores(alone, computed)
    first, other = run_ranks(live_poisoned, 2, SIZES[sizes], CONFIG, whole, [script], deadline=240.0)
    assert_same(first[0], alone)
    assert (other[0].counters, other[0].steps) == (first[0].counters, first[0].steps)
    assert first[0].geometry.log_prob_bytes == (2 if sizes == "TP 2" else 1) * alone.geometry.log_prob_bytes


def assert_same_scores(one: Lived, other: Lived) -> None:
    for name, record in one.records.items():
        if record.prompt_log_probs and other.records[name].prompt_log_probs:
            assert_close(record.prompt_log_probs, other.records[name].prompt_log_probs, 1e-4, f"request {name}")
