"""CU-21: captured steps of two ranks that share a model, uncaptured as on every CPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from unittest import mock

import pytest

from megatron_ext.config import ParallelConfig
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.speculation.drafter import DraftRequest
from megatron_ext.speculation.drafting import Drafting
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.multi_token import build_predicting, with_prediction
from tests.unit_tests.support.parallel_contexts import Lived, assert_same, live
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import everything, with_vocabulary
from tests.unit_tests.support.spread import whole_parameters

pytestmark = pytest.mark.worlds


def count(*arguments: object) -> tuple[Lived, int]:
    """One rank's life, with drafts in every third step, and how many of its steps are captured ones."""
    propose, turns = Drafting.propose, itertools.count()

    def seldom(self: Drafting, asks: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        return {} if next(turns) % 3 else propose(self, asks)

    with (
        mock.patch.object(CudaGraphRunner, "sample", autospec=True, side_effect=CudaGraphRunner.sample) as sample,
        mock.patch.object(Drafting, "propose", seldom),
    ):
        return live(*arguments), sample.call_count


# Drafts of multi-token prediction, whose steps are eager -> fields of the model.
DRAFTS = {"none": None, "one_layer": {}, "depths": {"mtp_num_layers": 2, "mtp_use_repeated_layer": False}}


@pytest.mark.parametrize("fields", DRAFTS.values(), ids=DRAFTS)
def test_two_ranks_equal_one(fields):
    """CU-21, MR-3, SP-16: hits, restores, an abort, new weights, a suspend: tokens and counts are those of one rank."""
    script = everything("kernel")
    if fields is None:
        config = with_vocabulary(CONFIGS["hybrid"])
        whole = whole_parameters(build_slow_decay(config))
    else:
        config = dataclasses.replace(with_vocabulary(with_prediction("hybrid")), **fields)
        whole, script = whole_parameters(build_predicting("hybrid", config)), dataclasses.replace(script, mtp=2)
    captured = dataclasses.replace(script, batching={**script.batching, "cuda_graph_impl": "local"})
    alone, of_one = count(None, config, whole, script)
    two = run_ranks(count, 2, ParallelConfig(tensor_model_parallel_size=2), config, whole, captured)
    (first, of_first), (_, of_second) = two
    assert_same(first, alone)
    assert of_one == 0
    assert of_first == of_second > first.steps / (3 if fields is None else 8)
    assert (first.counters.accepted > 5) is (fields is not None)
