"""Drafts that a drafter proposes: checked, and requested only in steps in which a call is worth its time (SP-1)."""

from __future__ import annotations

import pytest

from megatron_ext.speculation.drafter import Drafter
from megatron_ext.speculation.proposals import DraftError, Proposals
from tests.unit_tests.scheduling.spec_decode.test_verification import decoding


class Saying(Drafter):
    """A drafter with one answer."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def propose(self, asks):
        return {asks[0].request_id: self.answer}


class TestProposals:
    @pytest.mark.parametrize("answer", [(97,), (-1,), (1.5,), ("a",), None, 5, (1, 2, 3, 4)])
    def test_invalid_drafts(self, answer):
        scheduler, _ = decoding()
        proposals = Proposals(Saying(answer), lambda ids: all(0 <= one < 97 for one in ids))
        drafts, errors = proposals.propose(scheduler)
        assert drafts == {}
        assert [type(error) for error in errors] == [DraftError]

    def test_idle_steps_have_no_call(self):
        """SP-6: a drafter is not called in the steps that it declares idle, and is called after them."""
        scheduler, _ = decoding()
        saying, asked, idle = Saying(()), [], iter([0, 2, 3, 0, 0])

        def propose(asks):
            asked.append(step)
            saying.idle_steps = next(idle)
            return {7: (1,)}

        saying.propose = propose
        proposals = Proposals(saying, lambda ids: True)
        found = []
        for step in range(10):
            drafts, _ = proposals.propose(scheduler)
            found += [step] if drafts else []
        assert asked == found == [0, 1, 4, 8, 9]

    def test_requests_without_room_for_drafts_are_not_proposed_for(self):
        scheduler, _ = decoding(params={"num_tokens_to_generate": 2})
        assert Proposals(Saying((1,)), lambda ids: True).propose(scheduler) == ({}, [])
        scheduler, _ = decoding()
        assert Proposals(Saying([1, 2]), lambda ids: True).propose(scheduler) == ({7: (1, 2)}, [])
