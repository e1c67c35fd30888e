"""Execution needs only the message of a step: no request, no scheduler, no second copy of a fact."""

from __future__ import annotations

import pickle

import pytest
import torch

from megatron_ext.runner.input_writer import StagingRules
from megatron_ext.runner.model_input import stage_step
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import Sampling, ScheduledChunk, ScheduledStep, Scoring
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt

RULES = StagingRules(
    block_size=4,
    dummy_block=99,
    kernel_chunk=2,
    has_states=True,
    token_rounder=8,
    snapshots_in_prefill=True,
    device=torch.device("cpu"),
)
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=0.0, uniform=None, forbidden=(), top_n=None)
STEP = ScheduledStep(
    chunks=(
        ScheduledChunk(7, (50,), 9, 10, True, (3, 4, 5), 4, 2, sampling=GREEDY),
        ScheduledChunk(8, (60,), 4, 5, True, (6, 7), 0, 1, sampling=GREEDY),
        ScheduledChunk(
            9,
            (70, 71, 72, 73, 74),
            3,
            8,
            False,
            (8, 9),
            4,
            0,
            snapshots=(Snapshot(4, b"digest", 5), Snapshot(8, b"other", 6)),
            scoring=Scoring(4, 6, (72, 73), 1),
        ),
    ),
    num_decode=2,
)


def test_tensors_of_a_message_alone():
    """Every tensor of a step of two decodes and a prefill that continues, written out."""
    staged = stage_step(STEP, RULES)
    assert [chunk.request_id for chunk in staged.chunks] == [8, 7, 9]  # decodes in the order of their slots
    assert staged.input_ids.tolist() == [60, 50, 70, 71, 72, 73, 74, 0]
    assert staged.position_ids.tolist() == [4, 9, 3, 4, 5, 6, 7, 0]
    # block * 4 + offset; position 3 of request 9 lies in a block that others use
    assert staged.slot_mapping.tolist() == [7 * 4, 5 * 4 + 1, 99 * 4 + 3, 36, 37, 38, 39]
    batch = staged.paged_batch
    assert batch.block_table.tolist() == [[6, 7, 0], [3, 4, 5], [8, 9, 0]]
    assert (batch.kv_lengths, batch.cu_seqlens_q.tolist()) == ((5, 10, 8), [0, 1, 2, 7])
    step = staged.recurrent
    assert step.decode_slots == slice(1, 3)
    assert step.prefill_slots.live.tolist() == [0]
    assert step.prefill_slots.has_initial_state.tolist() == [True]
    assert step.chunks.chunk_lengths == (1, 2, 2)
    assert (step.chunks.resumes.multiple, step.chunks.resumes.ends.tolist()) == (4, [8])
    places = step.prefill_slots.snapshots
    assert (places.slots.tolist(), places.chunks.tolist(), places.tokens.tolist()) == ([5, 6], [0, 2], [1, 5])
    assert staged.sample_tokens.tolist() == [0, 1]
    assert [row.request_id for row in staged.sampling] == [8, 7]
    assert staged.score_tokens.tolist() == [3, 4]
    (score,) = staged.prompt_scores
    assert (score.request_id, score.rows, score.targets) == (9, slice(0, 2), (72, 73))


def through_a_wire(driver: Driver) -> list[ScheduledStep]:
    """Let the driver's context see copies of messages only; those that it saw."""
    stage, seen = driver.context.stage, []

    def stage_copy(message: ScheduledStep) -> None:
        seen.append(pickle.loads(pickle.dumps(message)))
        stage(seen[-1])

    driver.context.stage = stage_copy
    return seen


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_a_run_on_pickled_messages_equals_the_oracle(get_driver, get_oracle, kind):
    driver = get_driver(kind, max_tokens=40)
    seen = through_a_wire(driver)
    for request_id, length in enumerate((3, 70, 17)):
        driver.add(request_id, make_prompt(length))
    driver.run()
    assert len(seen) > 8
    for request_id in range(3):
        assert_equals_oracle(driver, request_id, get_oracle(kind))
