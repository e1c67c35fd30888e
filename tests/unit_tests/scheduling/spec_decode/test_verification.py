"""Verified drafts of a step, accepted drafts, and places of the states after them; computed by hand."""

from __future__ import annotations

import random

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request, RequestRng
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.spec_decode.verification import DraftSlots, accepted_tokens, max_drafts
from megatron_ext.scheduling.step import describe_step
from tests.unit_tests.scheduling.builders import make_limits

DRAFTS = {"max_drafts": 3, "draft_states": 12}


def decoding(prompt: int = 5, *, slots: int | None = None, policy: object = None, **limits: object):
    """A scheduler (blocks of 4) with one request that has its first token."""
    params = limits.pop("params", {})
    scheduler = Scheduler(make_limits(**(DRAFTS | limits)), policy, b"model", slots)
    wishes = RequestParams(**({"num_tokens_to_generate": 20} | params))
    request = Request(7, RequestInputs(tuple(range(prompt)), wishes), arrival=0, seed=0, end_ids=(99,))
    scheduler.add(request)
    while not request.generated_count:
        step_of(scheduler, 50)
    return scheduler, request


def step_of(scheduler: Scheduler, token: int, *behind: int):
    """A step of one request, which draws these."""
    step = describe_step(scheduler.schedule().chunks, scheduler.limits.block_size)
    (chunk,) = step.chunks
    scheduler.commit(step, {7: token} if chunk.sampling else {}, {7: behind} if chunk.target_sampling else {})
    scheduler.check()
    return chunk


class TestDraws:
    def test_looking_ahead_changes_nothing(self):
        """SP-3: a token has the uniform number that it has without speculation, however often drafts looked ahead."""
        plain, looking, source = RequestRng(5), RequestRng(5), random.Random(1)
        for _ in range(50):
            ahead = [looking.current(i) for i in range(source.randint(0, 4))]
            assert ahead[:1] in ([], [plain.current()])
            assert looking.current() == plain.current()
            plain.advance()
            looking.advance()


class TestAcceptedTokens:
    @pytest.mark.parametrize(
        ("drafts", "drawn", "came"),
        [
            ((1, 2, 3), (1, 2, 3, 4), [1, 2, 3, 4]),
            ((1, 2, 3), (1, 9, 3, 4), [1, 9]),
            ((1, 2, 3), (9, 2, 3, 4), [9]),
            ((1, 99, 3), (1, 99, 3, 4), [1, 99]),
            ((99,), (99, 1), [99]),
        ],
    )
    def test_until_one_is_another_or_the_end(self, drafts, drawn, came):
        _, request = decoding()
        assert accepted_tokens(request, drafts, drawn) == came

    def test_an_end_before_the_least_number_goes_on(self):
        _, request = decoding(params={"min_tokens": 3})
        assert accepted_tokens(request, (1, 99, 3), (1, 99, 3, 4)) == [1, 99, 3, 4]
        assert accepted_tokens(request, (1, 2, 99), (1, 2, 99, 4)) == [1, 2, 99]


class TestLimits:
    @pytest.mark.parametrize(
        ("params", "limits", "expected"),
        [
            ({}, {}, 3),
            ({"num_tokens_to_generate": 3}, {}, 1),  # one is there, and one comes after the draft
            ({"num_tokens_to_generate": 2}, {}, 0),
            ({"num_speculative_tokens": 1}, {}, 1),
            ({"num_speculative_tokens": 0}, {}, 0),
            ({}, {"aligned_chunks": True}, 2),  # the known token is at 5, its block ends after 7
            ({"stop_words": ("x",)}, {}, 1),  # and does not end with a draft
        ],
    )
    def test_by_hand(self, params, limits, expected):
        scheduler, request = decoding(slots=4, policy=EvictionPolicyName.LRU, params=params, **limits)
        assert max_drafts(request, scheduler.limits) == expected

    @pytest.mark.parametrize(
        ("limits", "expected"),
        [
            ({}, 3),
            ({"max_tokens": 4, "max_requests": 1}, 3),
            ({"max_tokens": 3, "max_requests": 1}, 2),
            ({"max_tokens": 1, "max_requests": 1}, 0),
            ({"total_blocks": 2}, 2),  # of 4 tokens each; the known one is at 5
            ({"draft_states": 2}, 1),  # one after each token but the last, and one at 8 if that is reached
            ({"draft_states": 1}, 1),
            ({"draft_states": 0}, 0),
        ],
    )
    def test_drafts_get_the_remaining_capacity_of_a_step(self, limits, expected):
        """SP-5: tokens, free blocks, slots for states."""
        scheduler, _ = decoding(slots=4, policy=EvictionPolicyName.LRU, **({"max_tokens": 16} | limits))
        scheduler.propose({7: (1, 2, 3)})
        chunk = step_of(scheduler, 9, *[8] * expected)
        assert len(chunk.target_sampling) == expected

    def test_decodes_without_drafts_come_first(self):
        """SP-2: to the layers a chunk with drafts is a prefill, though its request is the older one."""
        scheduler, _ = decoding(slots=4, max_tokens=16)
        scheduler.add(Request(8, RequestInputs((50, 51), RequestParams(num_tokens_to_generate=9)), 1, seed=1))
        scheduler.commit(describe_step(scheduler.schedule().chunks, 4), {7: 60, 8: 61})
        scheduler.propose({7: (1, 2)})
        step = describe_step(scheduler.schedule().chunks, 4)
        assert [(one.request_id, one.length) for one in step.chunks] == [(8, 1), (7, 3)]
        assert step.num_decode == 1

    def test_nothing_cached_goes_for_a_draft(self):
        """SP-5: two of three blocks are the request's, and one is cached and evictable."""
        scheduler, _ = decoding(slots=4, policy=EvictionPolicyName.LRU, total_blocks=3)
        scheduler.add(Request(8, RequestInputs((50, 51, 52, 53), RequestParams(num_tokens_to_generate=1)), 1, seed=1))
        scheduler.commit(describe_step(scheduler.schedule().chunks, 4), {7: 60, 8: 61})
        assert (scheduler.cache.pool.free_count, scheduler.cache.available_count) == (0, 1)
        scheduler.propose({7: (1, 2, 3)})
        chunk = step_of(scheduler, 9, 9)
        assert (chunk.start, chunk.drafts) == (6, (1,)), "the second draft would need a block"
        assert scheduler.cache.use().blocks_evicted == 0


class TestStates:
    def test_a_rejected_draft_is_restored_from_its_own_slot(self):
        """SP-2: the state after the last accepted token, by name; all other slots are free."""
        scheduler, request = decoding(slots=4, policy=EvictionPolicyName.LRU)
        scheduler.propose({7: (1, 2, 3)})
        chunk = step_of(scheduler, 1, 9, 9, 9)
        assert (chunk.start, chunk.end, chunk.drafts, request.computed_end) == (5, 9, (1, 2, 3), 7)
        named = {one.position: one for one in chunk.snapshots if DraftSlots.is_name(one.block_hash)}
        assert sorted(named) == [6, 7, 8]
        assert [one.position for one in chunk.snapshots if not DraftSlots.is_name(one.block_hash)] == [8]
        assert request.draft_states == (named[7],)
        assert len(scheduler.drafts.slots) == DRAFTS["draft_states"] - 1
        assert len(request.block_table) == 2, "the block of the third draft is free"
        following = step_of(scheduler, 50)
        assert (following.restore.slot, following.restore.block_hash) == (named[7].slot, named[7].block_hash)
        assert len(scheduler.drafts.slots) == DRAFTS["draft_states"]

    def test_a_boundary_inside_an_accepted_run_is_a_snapshot(self):
        """SP-4: the snapshot is where it was written, under the block's hash, and the number of slots is unchanged."""
        scheduler, request = decoding(slots=4, policy=EvictionPolicyName.LRU)
        states = scheduler.cache.states
        scheduler.propose({7: (1, 2, 3)})
        chunk = step_of(scheduler, 1, 2, 3, 4)
        assert request.computed_end == 9
        (wanted,) = [one for one in chunk.snapshots if not DraftSlots.is_name(one.block_hash)]
        assert wanted.block_hash == request.block_hashes[1]
        assert states.find(wanted.block_hash) == wanted.slot
        assert len(states.slots) == 4
        assert request.restore is None, "the live state is right"

    @pytest.mark.parametrize("when", ["before the step", "while it is computed"])
    def test_no_snapshot_at_a_boundary_after_a_reset(self, when):
        """SP-4, EX-4: the states follow from blocks cached before the reset, which cannot be found afterwards."""
        scheduler, request = decoding(slots=4, policy=EvictionPolicyName.LRU)
        scheduler.propose({7: (1, 2, 3)})
        if when == "before the step":
            scheduler.reset_prefix_cache()
        step = describe_step(scheduler.schedule().chunks, scheduler.limits.block_size)
        if when == "while it is computed":
            scheduler.reset_prefix_cache()
        scheduler.commit(step, {7: 1}, {7: (2, 3, 4)})
        scheduler.check()
        assert request.computed_end == 9
        assert any(one.position == 8 and not DraftSlots.is_name(one.block_hash) for one in step.chunks[0].snapshots)
        assert scheduler.cache.states.used_count == 0
        assert request.snapshot_plan.decode is None

    @pytest.mark.parametrize("accepted", range(4))
    @pytest.mark.parametrize("prompt", range(4, 8))
    def test_blocks_of_accepted_drafts_stay(self, prompt, accepted):
        """SP-2, SP-5: blocks of computed tokens, the same ones, in a pool without others; the rest is free again."""
        scheduler, request = decoding(prompt, slots=4, policy=EvictionPolicyName.LRU, total_blocks=3)
        scheduler.propose({7: (1, 2, 3)})
        chunk = step_of(scheduler, *(1, 2, 3)[:accepted], *[9] * (4 - accepted))
        assert request.computed_end == prompt + 1 + accepted
        kept = -(-request.computed_end // 4)
        assert request.block_table == chunk.block_ids[:kept]
        assert len(request.block_table) == kept

    def test_no_snapshot_at_a_boundary_after_a_rejected_draft(self):
        scheduler, request = decoding(slots=4, policy=EvictionPolicyName.LRU)
        scheduler.propose({7: (1, 2, 3)})
        step_of(scheduler, 1, 9, 9, 9)
        assert scheduler.cache.states.used_count == 1, "that of the prompt"
        assert request.snapshot_plan.decode is None
        assert scheduler.cache.use().blocks_cached == 1

    def test_slots_come_back_whatever_happens(self):
        """SP-5: a failing step, a preemption, an end, a suspend."""
        for happens in ("abandon", "end", "suspend", "reset_prefix_cache"):
            scheduler, request = decoding(slots=4, policy=EvictionPolicyName.LRU)
            scheduler.propose({7: (1, 2, 3)})
            if happens == "abandon":
                scheduler.abandon(scheduler.schedule().chunks, "planted")
            else:
                step_of(scheduler, 9, 9, 9, 9)
                if happens == "end":
                    scheduler.end(request, Outcome(Status.ABORTED))
                else:
                    getattr(scheduler, happens)()
            scheduler.check()
            kept = 1 if happens == "reset_prefix_cache" else 0
            assert len(scheduler.drafts.slots) == DRAFTS["draft_states"] - kept
