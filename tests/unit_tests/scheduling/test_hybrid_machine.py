"""KV-6, HY-4, EX-2 to EX-4: random requests to a model whose states must be restored, checked by contents.

The machine is that of attention-only models. It takes admissions from the plan, but a request resumes at the last
snapshot in its match, and the slot that it restores must hold the states after exactly the tokens that it skips.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings

from megatron_ext.prefix_cache.state_index import SlotId, StateIndex
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits, SnapshotRequest, StepPlan
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.snapshots.placement import OpportunisticRules
from tests.unit_tests.scheduling.cache_model import Owner, content
from tests.unit_tests.scheduling.caching_machine import CachingMachine
from tests.unit_tests.support.planted import assert_found


class HybridMachine(CachingMachine):
    """Follows running state slots and slots by what is in them."""

    slot_counts = st.sampled_from([8, 2, 1, 0])

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, object] = {}
        self.slots: dict[int, object] = {}

    def draw_limits(self, data: st.DataObject) -> SchedulerLimits:
        """SI-1: most leave snapshots at any boundary.

        LA-1: in one life of three chunks are aligned, with a budget of a block or a few tokens more.
        """
        limits = super().draw_limits(data)
        guesses = OpportunisticRules(data.draw(st.sampled_from([None, None, 2, 0]), "most"), spacing=1)
        limits = dataclasses.replace(limits, opportunistic=guesses)
        if data.draw(st.sampled_from([False, False, True]), "aligned"):
            budget = limits.block_size + data.draw(st.integers(0, 3), "tokens beside a block")
            limits = dataclasses.replace(
                limits, aligned_chunks=True, chunked_prefill=True, max_tokens=max(budget, limits.max_requests)
            )
        return limits

    def expect_admissions(self, plan: StepPlan) -> dict[int, tuple]:
        """Expect the planned outcome if it matches the cached blocks and skips no more than those."""
        outcomes: dict[int, tuple] = {}
        for one in plan.admissions:
            owner, chunk = self.owner_of(one.request), one.chunk
            matched = len(self.world.match(owner)) if owner.reads else 0
            assert chunk.start == self.resume_point(owner, matched), "not the last snapshot in its match"
            assert (one.restore is None) == (chunk.start == 0)
            outcomes[owner.name] = ("admit", matched, one.new_blocks, chunk.start, chunk.end)
        for one in plan.deferrals:
            following = ("defer", one.resource, one.needed, one.available)
            outcomes[one.request.request_id] = following if one.wait_for is None else ("follow", one.wait_for)
        return outcomes

    def skips(self, owner: Owner) -> int:
        return self.resume_point(owner, len(self.world.match(owner)) if owner.reads else 0)

    def resume_point(self, owner: Owner, matched: int) -> int:
        """HY-3: the largest boundary below the end, within so many blocks, whose states are in a visible slot."""
        hashes = self.requests[owner].block_hashes[: min(matched, (len(owner.tokens) - 1) // self.limits.block_size)]
        found = [self.scheduler.cache.states.find(block_hash) is not None for block_hash in hashes]
        return max((i + 1 for i, is_there in enumerate(found) if is_there), default=0) * self.limits.block_size

    def write(self, chunks: tuple[Chunk, ...]) -> None:
        """Restores are copied before anything is written."""
        super().write(chunks)
        for chunk in chunks:
            self.begin(chunk)
        written: dict[SlotId, object] = {}
        for chunk in chunks:
            owner, request = self.owner_of(chunk.request), chunk.request
            assert self.live[request.running_slot] == content(owner, chunk.start), "states of another position"
            for snapshot in request.snapshots:
                if chunk.start < snapshot.position <= chunk.end:
                    assert not self.limits.aligned_chunks or snapshot.position == chunk.end, "only ends leave states"
                    assert snapshot.slot not in written, "two write one slot"
                    written[snapshot.slot] = content(owner, snapshot.position)
            self.live[request.running_slot] = content(owner, chunk.end)
        self.slots |= written

    def judge(self, plan: StepPlan) -> None:
        """LA-1: no token is left over while a request gets none, unless a leader stops for its followers."""
        super().judge(plan)
        if not self.limits.aligned_chunks:
            return
        assert all(one.available == 0 for one in plan.deferrals if one.resource == "tokens"), (
            "no request was deferred for a token that it could use"
        )
        chunks = {chunk.request: chunk for chunk in plan.chunks}
        entering = {admission.request for admission in plan.admissions}
        prefills = [one.length for one in plan.chunks if one.request in entering or not one.request.is_decoding]
        spare = self.limits.max_tokens - sum(chunk.length for chunk in plan.chunks)
        if (beside := self.prefill_tokens_left(plan, prefills)) is not None:  # SC-4
            spare = min(spare, beside)
        size = self.limits.block_size
        for owner in self.placed("running"):
            request = self.requests[owner]
            if request not in chunks:
                stops = any(deferral.snapshot is not None for deferral in plan.deferrals)
                assert spare == 0 or stops, f"{request.request_id} gets none of {spare} tokens"
            elif request.chain is not None:
                self.judge_end(chunks[request], size)

    def judge_end(self, chunk: Chunk, size: int) -> None:
        """Check that a chunk that reaches a boundary ends on one, or at the end of the sequence after its last one."""
        length = len(chunk.request.tokens)
        if chunk.end == length:
            assert (length - 1) // size * size <= chunk.start
        else:
            assert chunk.end % size == 0 or chunk.end // size == chunk.start // size

    def begin(self, chunk: Chunk) -> None:
        owner, restore = self.owner_of(chunk.request), chunk.request.restore
        if restore is not None:
            assert self.slots.get(restore.slot) == content(owner, chunk.start), "restores what is of others"
            self.live[chunk.request.running_slot] = self.slots[restore.slot]
        elif chunk.start == 0:
            self.live[chunk.request.running_slot] = content(owner, 0)

    def verify_request(self, owner: Owner, request: Request) -> None:
        """No snapshot can be found that does not hold what its key says."""
        super().verify_request(owner, request)
        if self.key_weights[owner] != self.weights or owner.opts_out:
            return
        for blocks, block_hash in enumerate(request.block_hashes, start=1):
            slot = self.scheduler.cache.states.find(block_hash)
            if slot is not None:
                _, _, tokens = self.slots[slot]
                assert tokens == owner.tokens[: blocks * self.limits.block_size]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler"):
            states = self.scheduler.cache.states
            assert states.obtainable_count == states.total, "a slot is reserved without a request"


COMMON = {
    "deadline": None,
    "stateful_step_count": 20,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
    "database": None,
}
HybridMachine.TestCase.settings = settings(
    max_examples=12, phases=[Phase.generate, Phase.shrink], print_blob=True, **COMMON
)
TestHybrid = HybridMachine.TestCase


# Negative controls


def restores_any_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateIndex, "find", lambda self, block_hash: next(iter(self._visible.values()), None))


def names_snapshots_after_the_block_before(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Scheduler._reserve_snapshots

    def misname(self: Scheduler, wanted: Sequence[SnapshotRequest]) -> None:
        places = [max(0, one.position // self.limits.block_size - 2) for one in wanted]
        pairs = zip(wanted, places, strict=True)
        reserve(self, [dataclasses.replace(one, block_hash=one.request.block_hashes[place]) for one, place in pairs])

    monkeypatch.setattr(Scheduler, "_reserve_snapshots", misname)


def shows_snapshots_before_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Scheduler._reserve_snapshots

    def reserve_and_commit(self: Scheduler, wanted: Sequence[SnapshotRequest]) -> None:
        reserve(self, wanted)
        for request in self.queues:
            for snapshot in request.snapshots:
                self.cache.states.commit(snapshot.block_hash)
            request.snapshots = []

    monkeypatch.setattr(Scheduler, "_reserve_snapshots", reserve_and_commit)


def keeps_snapshots_of_evicted_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateIndex, "drop", lambda self, block_hash: None)


def keeps_snapshots_over_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateIndex, "clear", lambda self: None)


@pytest.mark.long
@pytest.mark.parametrize(
    "plant",
    [
        restores_any_snapshot,
        names_snapshots_after_the_block_before,
        shows_snapshots_before_they_are_taken,
        keeps_snapshots_of_evicted_blocks,
        keeps_snapshots_over_a_reset,
    ],
)
def test_the_machine_finds_a_planted_mistake(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    assert_found(HybridMachine)
