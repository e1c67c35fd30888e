"""CU-21: captured steps of two ranks that share a model, uncaptured as on every CPU."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest

from megatron_ext.config import ParallelConfig
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from tests.priority import TestPriority
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Lived, assert_same, live
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import everything, with_vocabulary
from tests.unit_tests.support.spread import whole_parameters

pytestmark = [pytest.mark.worlds, pytest.mark.priority(TestPriority.HIGH)]


def count(*arguments: object) -> tuple[Lived, int]:
    """One rank's life, and how many of its steps are captured ones."""
    with mock.patch.object(CudaGraphRunner, "launch", autospec=True, side_effect=CudaGraphRunner.launch) as launch:
        return live(*arguments), launch.call_count


def test_two_ranks_equal_one():
    """CU-21, MR-3: hits, restores, an abort, new weights, a suspend: tokens and counts are those of one rank."""
    config = with_vocabulary(CONFIGS["hybrid"])
    whole = whole_parameters(build_slow_decay(config))
    script = everything("kernel")
    captured = dataclasses.replace(script, batching={**script.batching, "cuda_graph_impl": "local"})
    alone, of_one = count(None, config, whole, script)
    two = run_ranks(count, 2, ParallelConfig(tensor_model_parallel_size=2), config, whole, captured)
    (first, of_first), (_, of_second) = two
    assert_same(first, alone)
    assert of_one == 0
    assert of_first == of_second > first.steps / 3
