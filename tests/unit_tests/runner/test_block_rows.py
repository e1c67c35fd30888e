"""Rows of block tables that steps share: as if each step had been staged alone, written no more often than needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ext.runner.input_writer import BlockRows, StagingRules
from megatron_ext.runner.model_input import stage_step
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep
from tests.unit_tests.scheduling.test_step import play

BLOCK = 4
RULES = StagingRules(
    block_size=BLOCK,
    dummy_block=99,
    kernel_chunk=2,
    has_states=True,
    snapshots_in_prefill=True,
    device=torch.device("cpu"),
)


def differing_steps(seeds: range) -> int:
    """Steps of random lives that are staged otherwise than alone."""
    differing = 0
    for seed in seeds:
        rows = BlockRows()
        for step in play(seed):
            if step.chunks:
                differing += not equal(step, rows)
    return differing


def equal(step: ScheduledStep, rows: BlockRows) -> bool:
    shared, alone = stage_step(step, RULES, rows), stage_step(step, RULES)
    return torch.equal(shared.slot_mapping, alone.slot_mapping) and torch.equal(
        shared.paged_batch.block_table, alone.paged_batch.block_table
    )


def test_steps_that_share_rows_are_staged_as_if_alone():
    """Requests come, grow, end, and leave their running state slots to others."""
    assert differing_steps(range(6)) == 0


def test_rows_that_are_not_written_anew_are_found(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the first table of a running state slot stays."""
    write = BlockRows._write

    def write_once(self: BlockRows, slot: int, table: tuple[int, ...]) -> None:
        if not self._written[slot]:
            write(self, slot, table)

    monkeypatch.setattr(BlockRows, "_write", write_once)
    assert differing_steps(range(2)) > 0


def test_tables_are_int32_and_places_are_not():
    """CU-24: a pool may have more than 2^31 tokens, in fewer blocks than that."""
    rules = dataclasses.replace(RULES, block_size=1 << 24, dummy_block=1 << 9)
    steps = [one for one in play(0) if one.chunks]
    staged = [stage_step(one, rules) for one in steps]
    assert {one.paged_batch.block_table.dtype for one in staged} == {torch.int32}
    assert {one.slot_mapping.dtype for one in staged} == {torch.int64}
    assert min(int(one.slot_mapping.min()) for one in staged) >= 0
    assert max(int(one.slot_mapping.max()) for one in staged) > 1 << 31


def test_states_to_keep_are_ordered_by_sequence_and_tokens():
    """CU-27: though slots are reserved in another order, two at one place."""

    def prefill(*kept: tuple[int, int]) -> ScheduledChunk:
        snapshots = tuple(Snapshot(position, b"digest", slot) for position, slot in kept)
        return ScheduledChunk(1, (7,) * 8, 0, 8, False, (8, 9), 0, 0, snapshots=snapshots)

    step = ScheduledStep((prefill((8, 1), (4, 2)), prefill(), prefill((6, 3), (2, 4), (6, 5))), 0)
    places = stage_step(step, RULES).recurrent.prefill_slots.snapshots
    assert places.offsets.tolist() == [0, 2, 2, 5]
    assert places.slots.tolist() == [2, 1, 4, 3, 5]
    assert places.tokens.tolist() == [4, 8, 18, 22, 22]
    assert places.chunks.tolist() == [1, 3, 8, 10, 10]
