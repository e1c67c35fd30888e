"""MR-2: `--check-ranks` compares what ranks are about to compute, and names the first field that differs."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from megatron_ext.config import ParallelConfig
from megatron_ext.parallel.shared_results import digest, first_difference
from megatron_ext.scheduling.step import Sampling, ScheduledChunk, ScheduledStep
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Lived, live
from tests.unit_tests.support.ranks import run_ranks, run_world
from tests.unit_tests.support.scenario import ACTIONS, everything, with_vocabulary
from tests.unit_tests.support.spread import Whole, whole_parameters

CONFIG = with_vocabulary(CONFIGS["hybrid"])
SCRIPT = dataclasses.replace(everything("kernel"), actions=ACTIONS[:13])
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=0.0, uniform=None, forbidden=(), top_n=None)
STEP = ScheduledStep(
    (
        ScheduledChunk(7, (50,), 9, 10, True, (3, 4, 5), 4, 2, sampling=GREEDY),
        ScheduledChunk(8, (60, 61), 4, 6, False, (6, 7), 0, 1),
    ),
    1,
)
TP2 = ParallelConfig(tensor_model_parallel_size=2, check_ranks=True)


@pytest.fixture(scope="module")
def whole() -> Whole:
    return whole_parameters(build_slow_decay(CONFIG))


def test_every_field_is_seen():
    assert digest(STEP) == digest(dataclasses.replace(STEP))
    second = dataclasses.replace(STEP.chunks[1], block_ids=(6, 8))
    other = dataclasses.replace(STEP, chunks=(STEP.chunks[0], second))
    assert digest(other) != digest(STEP)
    assert first_difference(STEP, other) == ("chunks[1].block_ids[1]", "7", "8")
    sampled = dataclasses.replace(STEP.chunks[0], sampling=dataclasses.replace(GREEDY, uniform=0.5))
    other = dataclasses.replace(STEP, chunks=(sampled, STEP.chunks[1]))
    assert first_difference(STEP, other) == ("chunks[0].sampling.uniform", "None", "0.5")
    assert first_difference(None, STEP) == ("", "None", repr(STEP)[:200])


def live_with_naps(parallel: ParallelConfig, whole: Whole) -> tuple[Lived, list[bytes]]:
    """Run `live` with sleeps, of other lengths on each rank, and return the hash of each step too."""
    import torch

    from megatron_ext.mcore.step_executor import StepExecutor

    compute, digests = StepExecutor.execute, []
    source = random.Random(torch.distributed.get_rank())

    def compute_watched(self, step):
        digests.append(digest(step))
        time.sleep(source.random() * 0.01)
        return compute(self, step)

    StepExecutor.execute = compute_watched
    return live(parallel, CONFIG, whole, SCRIPT), digests


@pytest.mark.worlds
def test_hash_seeds_and_naps_change_nothing(whole: Whole):
    """Processes of their own that order sets differently: equal digests at every step."""
    (lived, first), (_, second) = run_ranks(live_with_naps, 2, TP2, whole, hash_seeds=(1, 2))
    assert first == second
    assert len(first) == lived.steps > 15


def live_with_a_difference(parallel: ParallelConfig, whole: Whole) -> None:
    """Make one rank schedule something else in its fifth step."""
    import torch

    from megatron_ext.scheduling.scheduler import Scheduler

    if torch.distributed.get_rank() == 1:
        describe, steps = Scheduler.describe, []

        def describe_differently(self, plan):
            step = describe(self, plan)
            steps.append(step)
            if len(steps) == 5:
                first = dataclasses.replace(step.chunks[0], running_slot=99)
                step = dataclasses.replace(step, chunks=(first, *step.chunks[1:]))
            return step

        Scheduler.describe = describe_differently
    live(parallel, CONFIG, whole, SCRIPT)


@pytest.mark.worlds
@pytest.mark.parametrize("parallel", [TP2, dataclasses.replace(TP2, tensor_model_parallel_size=1)])
def test_a_difference_is_named(parallel: ParallelConfig, whole: Whole):
    """Within a replica, and between a replica and its mirror on rank 0."""
    outcomes = run_world(live_with_a_difference, 2, parallel, whole)
    for outcome in outcomes:
        assert "chunks[0].running_slot is " in outcome.cause, outcome.describe()
        assert "and 99 on rank 1 (--check-ranks)" in outcome.cause
    assert outcomes[0].cause == outcomes[1].cause


@pytest.mark.worlds
def test_without_it_nothing_is_compared(whole: Whole):
    """The negative control: the difference is there, and the run goes on with it until something else breaks."""
    outcomes = run_world(live_with_a_difference, 2, dataclasses.replace(TP2, check_ranks=False), whole)
    assert not any("--check-ranks" in outcome.cause for outcome in outcomes)
