"""SP-13: drafts of multi-token prediction on several ranks are those of one rank; all counts show it."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.config import ParallelConfig
from tests.priority import TestPriority
from tests.unit_tests.support.multi_token import LAYERS, build_predicting, with_prediction
from tests.unit_tests.support.parallel_contexts import assert_same, assert_same_record, live
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import ACTIONS, everything, part_of, with_vocabulary
from tests.unit_tests.support.spread import whole_parameters

pytestmark = pytest.mark.priority(TestPriority.HIGH)

TENSOR, PIPELINE = ParallelConfig(tensor_model_parallel_size=2), ParallelConfig(pipeline_model_parallel_size=2)
BOTH = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def script_of(mode: str, *, is_whole: bool):
    """A life with drafts: the first third has hits, a snapshot's restore, chunks, scores and an abort."""
    script = dataclasses.replace(everything(mode), mtp=3)
    return script if is_whole else dataclasses.replace(script, actions=ACTIONS[:13])


def cases() -> list:
    """The first third of a life on two layouts, and whole ones."""
    smoke = pytest.mark.worlds(smoke=True)
    layouts = {"tensor": TENSOR, "pipeline": PIPELINE}
    found = [pytest.param("hybrid", one, 2, False, id=name, marks=smoke) for name, one in layouts.items()]
    for name, one in layouts.items():
        found += [pytest.param(kind, one, 2, True, id=f"{kind}-{name}", marks=pytest.mark.worlds) for kind in LAYERS]
    return [*found, pytest.param("hybrid", BOTH, 4, True, id="both", marks=pytest.mark.worlds)]


@pytest.mark.parametrize(("kind", "parallel", "ranks", "is_whole"), cases())
def test_ranks_draft_as_one(kind, parallel, ranks, is_whole):
    """SP-13: tokens, log-probs, drafted, accepted and skipped tokens of each request, and all counters."""
    config, script = with_vocabulary(with_prediction(kind)), script_of("kernel", is_whole=is_whole)
    whole = whole_parameters(build_predicting(kind, config))
    alone = live(None, config, whole, script)
    lived, *others = run_ranks(live, ranks, parallel, config, whole, script)
    assert_same(lived, alone)
    assert lived.counters.accepted > 5
    for other in others:
        assert (other.counters.drafted, other.counters.accepted) == (alone.counters.drafted, alone.counters.accepted)


@pytest.mark.worlds
def test_replicas_draft_for_their_own():
    """SP-13: each replica drafts as an engine of its own."""
    config = with_vocabulary(with_prediction("hybrid"))
    script = dataclasses.replace(script_of("kernel", is_whole=False), takes_turns=True)
    whole = whole_parameters(build_predicting("hybrid", config))
    lived, _ = run_ranks(live, 2, ParallelConfig(), config, whole, script)
    for replica in range(2):
        alone = live(None, config, whole, part_of(script, replica, 2))
        for name, record in alone.records.items():
            assert_same_record(lived.records[name], record)
    assert lived.counters.accepted > 5
