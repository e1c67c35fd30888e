"""MR-3: several ranks whose blocks and snapshots share an arena on each live as one rank does, bit for bit alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from unittest import mock

import pytest

from megatron_ext.config import CacheConfig, ModelConfig, ParallelConfig
from megatron_ext.memory import budget, capacity
from megatron_ext.memory.arena import ArenaBudget, plan_slabs
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from tests.priority import TestPriority
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Lived, Script, assert_same
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import everything, live_poisoned, with_vocabulary
from tests.unit_tests.support.spread import Whole, whole_parameters

pytestmark = [pytest.mark.worlds, pytest.mark.priority(TestPriority.HIGH)]

CONFIG = with_vocabulary(CONFIGS["hybrid"])
SIZES = {
    "TP 2": ParallelConfig(tensor_model_parallel_size=2),
    "PP 2": ParallelConfig(pipeline_model_parallel_size=2),
}
LAYOUT = SlabLayout(7, 3)


def plan_few(ranks: Sequence[ArenaBudget]) -> SlabLayout:
    """Return a layout of as many slabs everywhere; its slabs are those that one rank would choose."""
    layout = plan_slabs(ranks)
    assert layout is not None
    assert layout.slabs > LAYOUT.slabs
    return LAYOUT


def live_in_arena(
    parallel: ParallelConfig | None, config: ModelConfig, whole: Whole, scripts: Sequence[Script]
) -> list[Lived]:
    shares = mock.patch.object(budget, "SHARES_MEMORY", new=True)
    with shares, mock.patch.object(capacity, "plan_slabs", plan_few):
        return live_poisoned(parallel, config, whole, scripts)


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks(sizes: str):
    """KV-7: the same slabs hold blocks and snapshots on all ranks, whatever part of a model each has."""
    script = everything("kernel")
    batching = {**script.batching, "block_count": None, "buffer_size_gb": 0.02}
    scripts = [dataclasses.replace(script, batching=batching, cache=CacheConfig())]
    whole = whole_parameters(build_slow_decay(CONFIG))
    (alone,) = live_in_arena(None, CONFIG, whole, scripts)
    assert alone.statistics["snapshots_taken"] > 10
    assert alone.statistics["hits"] > 0
    first, other = run_ranks(live_in_arena, 2, SIZES[sizes], CONFIG, whole, scripts, deadline=240.0)
    assert_same(first[0], alone)
    assert (other[0].counters, other[0].steps) == (first[0].counters, first[0].steps)
    assert first[0].geometry.slabs == LAYOUT
