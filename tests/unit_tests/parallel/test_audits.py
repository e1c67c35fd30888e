"""EX-15, MR-3: audits on several ranks, each of which compares its own layers and heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.engine import cache_audit
from megatron_ext.mcore import step_executor
from megatron_ext.memory.entry_memory import compare_entries
from megatron_ext.memory.pools import Pools
from megatron_ext.scheduling.audit import Comparison, Differences
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Lived, Script, live
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import everything, with_vocabulary
from tests.unit_tests.support.spread import Whole, whole_parameters

pytestmark = pytest.mark.worlds

CONFIG = with_vocabulary(CONFIGS["hybrid"])
SIZES = {
    "TP 2": ParallelConfig(tensor_model_parallel_size=2),
    "PP 2": ParallelConfig(pipeline_model_parallel_size=2),
    "DP 2": ParallelConfig(expert_model_parallel_size=1),
}


def live_audited(parallel: ParallelConfig, config: ModelConfig, whole: Whole, scripts: Sequence[Script]) -> list[Lived]:
    """Live twice: as everything is, and with one cached entry of the last rank damaged before it is compared."""
    damaged = []

    def compare_damaged(pools: Pools, comparison: Comparison, dtype: object) -> Differences:
        if comparison.blocks and pools.kv.shape[1] and not damaged:
            damaged.append(comparison)
            pools.kv[0, 0, comparison.blocks[0][1], 2] += 3.0
        return compare_entries(pools, comparison, dtype)

    sound, wrong = scripts
    with mock.patch.object(cache_audit, "AUDIT_SHARE", new=1e9):
        first = live(parallel, config, whole, sound)
        is_damaged = dist.get_rank() == dist.get_world_size() - 1
        with mock.patch.object(step_executor, "compare_entries", compare_damaged if is_damaged else compare_entries):
            second = live(parallel, config, whole, wrong)
    assert bool(damaged) == is_damaged
    return [first, second]


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks(sizes: str):
    """The damage of one rank is found by rank 0, and dropped on all; a sound cache reports nothing."""
    script = everything("kernel")
    script = dataclasses.replace(script, cache=dataclasses.replace(script.cache, audit_interval=1))
    whole = whole_parameters(build_slow_decay(CONFIG))
    (sound, wrong), (other, _) = run_ranks(live_audited, 2, SIZES[sizes], CONFIG, whole, [script] * 2, deadline=240.0)
    assert sound.statistics["audit_completed"] >= 2
    assert sound.statistics["audit_blocks"] > 4
    assert sound.statistics["audit_snapshots"] >= 2
    assert sound.statistics["audit_wrong_blocks"] == sound.statistics["audit_wrong_snapshots"] == 0
    assert wrong.statistics["audit_wrong_blocks"] == 1
    assert wrong.statistics["audit_dropped_blocks"] >= 1
    if sizes != "DP 2":
        assert other.steps == sound.steps
    for name, record in sound.records.items():
        assert wrong.records[name].generated_tokens == record.generated_tokens
