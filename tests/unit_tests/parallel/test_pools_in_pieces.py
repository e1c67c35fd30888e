"""MR-3: ranks whose blocks and snapshots lie as in an arena live as one rank with dense pools does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_ext.config import ModelConfig, ParallelConfig
from tests.priority import TestPriority
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Lived, Script, assert_same
from tests.unit_tests.support.pools_in_pieces import pools_in_pieces
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import everything, live_poisoned, with_vocabulary
from tests.unit_tests.support.spread import Whole, whole_parameters

pytestmark = [pytest.mark.worlds, pytest.mark.priority(TestPriority.HIGH)]

CONFIG = with_vocabulary(CONFIGS["hybrid"])
SIZES = {
    "TP 2": ParallelConfig(tensor_model_parallel_size=2),
    "PP 2": ParallelConfig(pipeline_model_parallel_size=2),
}


def live_in_pieces(
    parallel: ParallelConfig, config: ModelConfig, whole: Whole, scripts: Sequence[Script]
) -> list[Lived]:
    with pools_in_pieces():
        return live_poisoned(parallel, config, whole, scripts)


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks(sizes: str):
    whole, scripts = whole_parameters(build_slow_decay(CONFIG)), [everything("kernel")]
    (alone,) = live_poisoned(None, CONFIG, whole, scripts)
    first, other = run_ranks(live_in_pieces, 2, SIZES[sizes], CONFIG, whole, scripts, deadline=240.0)
    assert_same(first[0], alone)
    assert (other[0].counters, other[0].steps) == (first[0].counters, first[0].steps)
