"""Steps decided in literal situations: blocks of 4 tokens, and every chunk and count written out.

`chunks_of` gives (request id, start, end); request ids are 100 + arrival.
"""

from __future__ import annotations

import itertools

import pytest

from megatron_ext.config import RequestParams
from megatron_ext.scheduling.audit import AuditTarget
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.planner import chunk_end, plan_step, reason_to_refuse
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from tests.unit_tests.scheduling.builders import Situation, frozen, make_limits, make_request


def plan(situation: Situation) -> StepPlan:
    """KV-13: planning changes nothing, whatever it decides."""
    before = frozen(situation.queues)
    result = plan_step(situation.queues, situation.limits, situation.cache, PendingBlocks())
    assert frozen(situation.queues) == before
    return result


def chunks_of(step: StepPlan) -> list[tuple[int, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.end) for chunk in step.chunks]


def admitted(step: StepPlan) -> list[tuple[int, int]]:
    return [(admission.request.request_id, admission.new_blocks) for admission in step.admissions]


def moves(step: StepPlan) -> dict[str, list[int]]:
    """Moved requests by kind of move, without empty kinds."""
    named = {
        "preemptions": step.preemptions,
        "pauses": step.pauses,
        "resumes": step.resumes,
        "admissions": [admission.request for admission in step.admissions],
    }
    return {name: [request.request_id for request in requests] for name, requests in named.items() if requests}


class TestTokens:
    """Tokens of a step per request."""

    def test_decodes_come_first_then_running_prefill_then_admissions(self):
        situation = Situation(total_blocks=20)
        situation.prefilling(0, prompt=20, computed=8)
        situation.decoding(1, prompt=5, generated=2)
        situation.waiting(2, prompt=10)
        step = plan(situation)
        # 16 tokens: 1 decoded, 12 are the rest of request 100, 3 are left for 102.
        assert chunks_of(step) == [(101, 6, 7), (100, 8, 20), (102, 0, 3)]
        assert admitted(step) == [(102, 3)]
        assert step.deferrals == ()

    def test_after_a_preemption_too_many_tokens_are_cut_even_without_chunked_prefill(self):
        """The request was admissible with 14 prompt tokens; refusing it now would lose its generated tokens."""
        situation = Situation(chunked_prefill=False, max_tokens=16)
        situation.waiting(0, prompt=14, generated=5)
        assert chunks_of(plan(situation)) == [(100, 0, 16)]

    def test_one_generated_token_computed_again_counts_among_the_decodes(self):
        """A preempted request may get one token of the budget for a generated token: a decode to the layers."""
        situation = Situation(total_blocks=20, max_tokens=8)
        situation.prefilling(0, prompt=12, computed=5)
        situation.prefilling(1, prompt=4, generated=6, computed=5)
        step = plan(situation)
        assert [chunk.is_decode for chunk in step.chunks] == [True, False]
        assert chunks_of(step) == [(101, 5, 6), (100, 5, 12)]


class TestGrowth:
    """Blocks for the next token: older first, then pause, then preempt."""

    def test_the_older_request_gets_the_last_block(self):
        situation = Situation(total_blocks=3)
        situation.decoding(1, prompt=4, generated=1)
        situation.decoding(0, prompt=4, generated=1)
        step = plan(situation)
        assert chunks_of(step) == [(100, 4, 5)]
        assert moves(step) == {"pauses": [101]}

    def test_paused_requests_resume_oldest_first(self):
        situation = Situation(total_blocks=4)
        situation.paused(2, prompt=4, generated=1)
        situation.paused(0, prompt=4, generated=1)
        situation.decoding(1, prompt=2, generated=1)
        step = plan(situation)
        assert moves(step) == {"resumes": [100]}
        assert chunks_of(step) == [(100, 4, 5), (101, 2, 3)]

    def test_as_many_are_preempted_as_it_takes(self):
        situation = Situation(total_blocks=3)
        for arrival in range(3):
            situation.decoding(arrival, prompt=4, generated=1)  # 1 block each, all want a second
        step = plan(situation)
        assert moves(step) == {"pauses": [101], "preemptions": [102]}
        assert chunks_of(step) == [(100, 4, 5)]

    def test_paused_requests_keep_at_most_their_budget(self):
        situation = Situation(total_blocks=6, paused_blocks=3)
        situation.prefilling(0, prompt=8, computed=4)  # 2 blocks
        situation.paused(1, prompt=8, generated=1)  # 2 blocks
        situation.decoding(2, prompt=8, generated=1)  # 2 blocks: 4 would be kept
        step = plan(situation)
        # What request 102 gives up is enough for 101 to resume.
        assert moves(step) == {"preemptions": [102], "resumes": [101]}
        assert chunks_of(step) == [(101, 8, 9), (100, 4, 8)]

    def test_no_preemption_if_the_budget_is_met_exactly(self):
        situation = Situation(total_blocks=6, paused_blocks=4)
        situation.prefilling(0, prompt=8, computed=4)
        situation.paused(1, prompt=8, generated=1)
        situation.decoding(2, prompt=8, generated=1)
        assert moves(plan(situation)) == {"pauses": [102]}

    def test_the_paused_one_goes_even_if_a_younger_one_runs(self):
        """Running requests are not stopped: only paused requests are over the budget."""
        situation = Situation(total_blocks=3, paused_blocks=0)
        situation.decoding(0, prompt=8, generated=1)  # wants a third block
        situation.decoding(1, prompt=2, generated=1)  # has room in its block
        step = plan(situation)
        assert moves(step) == {"preemptions": [100]}
        assert chunks_of(step) == [(101, 2, 3)]


def test_a_chunk_of_an_audit_ends_at_the_snapshot_that_it_compares():
    """EX-15: the states at another position are not those of the snapshot."""
    audit = AuditTarget((), resume=12)
    request = Request(0, RequestInputs(tuple(range(30)), RequestParams()), arrival=0, seed=0, audit=audit)
    assert [chunk_end(request, start, 0, make_limits(), tokens=8) for start in (0, 8, 12)] == [8, 12, 20]


class TestAdmissible:
    """Requests that are refused before they wait."""

    @pytest.mark.parametrize(
        ("changes", "prompt", "generate", "expected"),
        [
            ({}, 32, 32, None),
            ({}, 32, 33, "32 tokens of prompt and 33 to generate are 65, and a sequence has at most 64; "),
            ({}, 33, 1, "33 tokens need 9 blocks, and the KV pool has 8, for 32 tokens; "),
            ({"total_blocks": 3}, 12, 30, None),  # ends where the pool ends
            ({"total_blocks": 3}, 13, 1, "13 tokens need 4 blocks, and the KV pool has 3, for 12 tokens; "),
            ({"chunked_prefill": False}, 16, 1, None),
            ({"chunked_prefill": False}, 17, 1, "17 tokens of prompt do not fit into a step, which has at most 16; "),
            ({"chunked_prefill": True}, 17, 1, None),
        ],
    )
    def test_permanent_limits(self, changes: dict, prompt: int, generate: int, expected: str | None):
        """KV-12: permanent errors with numbers and the remedy."""
        request = make_request(0, prompt, num_tokens_to_generate=generate)
        refusal = reason_to_refuse(request, make_limits(**changes))
        if expected is None:
            assert refusal is None
        else:
            assert refusal.startswith(f"{expected}shorten the prompt, or ")

    @pytest.mark.parametrize(("total_blocks", "length"), [(3, 12), (16, 64), (100, 64)])
    def test_the_longest_sequence_is_what_the_pool_holds(self, total_blocks: int, length: int):
        """KV-12."""
        assert make_limits(total_blocks=total_blocks).max_model_len == length

    def test_admissible_requests_are_admitted_alone(self):
        for prompt, generate, chunked in itertools.product(range(1, 34), (1, 8, 32), (True, False)):
            situation = Situation(chunked_prefill=chunked)
            request = make_request(0, prompt, num_tokens_to_generate=generate)
            if reason_to_refuse(request, situation.limits) is None:
                situation.queues.waiting.add(request)
                step = plan(situation)
                assert [admission.request for admission in step.admissions] == [request], (prompt, generate, chunked)
