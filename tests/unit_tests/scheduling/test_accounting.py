"""EX-2: every prompt token once, skipped or computed for the first reason that applies."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache import hash_chain
from megatron_ext.scheduling.accounting import PrefillLedger
from megatron_ext.scheduling.explanation import Reason
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, make_limits, request_of, step

LRU, REF_ZERO = EvictionPolicyName.LRU, EvictionPolicyName.REF_ZERO


class TestLedger:
    """Prompts of 10 tokens and blocks of 4, unless a test gives other sizes."""

    @staticmethod
    def reason(position: int, prompt: int, matched: int, size: int) -> str:
        """Reason of one computed token, by the table of EX-2."""
        is_last = position == prompt - 1
        if position < matched * size:
            return "last_token" if is_last else "no_snapshot"
        return "not_cached" if position < prompt // size * size else "partial_block"

    @pytest.mark.parametrize("cut", [1, 2, 9])
    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_any_prompt_resumed_anywhere_in_chunks_of_any_size(self, size, cut):
        """EX-2: token by token."""
        for prompt in range(1, 10):
            for matched in range(prompt // size + 1):
                for resume in {*range(0, min(matched * size, prompt - 1) + 1, size), min(matched * size, prompt - 1)}:
                    ledger = PrefillLedger(prompt)
                    ledger.admit(resume, matched, size)
                    for start in range(resume, prompt, cut):
                        ledger.compute(start, min(prompt, start + cut))
                    expected = Counter(self.reason(i, prompt, matched, size) for i in range(resume, prompt))
                    assert ledger.reasons == expected, (prompt, matched, resume)
                    assert (ledger.skipped, ledger.computed, ledger.recomputed) == (resume, prompt - resume, 0)

    @pytest.mark.parametrize("reason", [Reason.OPTED_OUT, Reason.CACHING_OFF, Reason.PROMPT_LOGPROBS])
    def test_a_general_reason_goes_before_all_others(self, reason):
        """EX-2."""
        ledger = PrefillLedger(10)
        ledger.general_reason = reason
        ledger.admit(0, 0, 4)
        ledger.compute(0, 7)
        ledger.compute(7, 10)
        assert ledger.reasons == {reason.value: 10}

    def test_tokens_of_a_continued_output_are_computed_again(self):
        """RL-11: those that an earlier request has generated; a token after them is new."""
        ledger = PrefillLedger(10, 13)
        ledger.admit(0, 0, 4)
        ledger.compute(0, 12)
        ledger.compute(12, 14)
        assert (ledger.computed, ledger.recomputed) == (10, 3)


def run(scheduler: Scheduler, *requests: Request, generate: int = 2) -> None:
    """Until these have generated so many tokens."""
    add(scheduler, *requests)
    for _ in range(100):
        step(scheduler)
        for request in requests:
            if not request.is_ended and request.generated_count >= generate:
                scheduler.end(request, Outcome(Status.COMPLETED))
        if all(request.is_ended for request in requests):
            return
    raise AssertionError("requests never end")


def accounts(request: Request) -> tuple[int, dict[str, int]]:
    return request.ledger.skipped, dict(request.ledger.reasons)


class TestRequests:
    """Ledger entries that a scheduler writes."""

    def test_reasons_of_prompts_after_a_first_one(self):
        """EX-2: all prompts have the first 8 tokens cached."""
        scheduler = Scheduler(make_limits(total_blocks=40), LRU)
        run(scheduler, request_of(0, range(8)))
        cases = {
            "same": (request_of(1, range(8)), (7, {"last_token": 1})),
            "longer": (request_of(2, range(9)), (8, {"partial_block": 1})),
            "another block": (request_of(3, [*range(8), 1, 2, 3, 4]), (8, {"not_cached": 4})),
            "parts early": (request_of(4, [*range(5), 90, 91, 92, 93]), (4, {"not_cached": 4, "partial_block": 1})),
            "short": (request_of(5, range(3)), (0, {"partial_block": 3})),
            "opted out": (request_of(6, range(8), enable_prefix_caching=False), (0, {"opted_out": 8})),
            "scores": (request_of(7, range(8), return_log_probs=True), (0, {"prompt_logprobs": 8})),
            "scores, opted out": (
                request_of(8, range(8), return_log_probs=True, enable_prefix_caching=False),
                (0, {"opted_out": 8}),
            ),
            "salt": (request_of(9, range(8), cache_salt="x"), (0, {"not_cached": 8})),
        }
        for name, (request, expected) in cases.items():
            run(scheduler, request)
            assert accounts(request) == expected, name
        assert scheduler.counters.skipped_tokens == sum(expected[0] for _, expected in cases.values())

    def test_no_snapshot(self):
        """EX-2: the blocks are there, but no states to begin with."""
        scheduler = Scheduler(make_limits(), LRU, slots=0)
        run(scheduler, request_of(0, range(8)))
        again = request_of(1, range(10))
        run(scheduler, again)
        assert accounts(again) == (0, {"no_snapshot": 8, "partial_block": 2})
        assert again.ledger.matched_blocks == 2
        assert (scheduler.counters.hits, scheduler.counters.blocks_matched) == (0, 2)


class TestCachingOff:
    """KV-8: caching off hashes, indexes and keeps nothing."""

    @staticmethod
    def live(scheduler: Scheduler, **params: object) -> None:
        first, second, third = (request_of(i, range(12), **params) for i in range(3))
        add(scheduler, first, second)
        step(scheduler)
        scheduler.abandon(scheduler.schedule().chunks, "planted")
        run(scheduler, third, generate=6)
        scheduler.suspend()
        step(scheduler)
        scheduler.weights_changed(restarts=False)
        scheduler.reset_prefix_cache()
        step(scheduler)
        assert (first.chain, second.chain, third.chain) == (None, None, None)
        assert scheduler.pending_blocks.requests() == set()
        use = scheduler.cache.use()
        assert (use.blocks_cached, use.blocks_evictable, use.blocks_evicted) == (0, 0, 0)
        for request in (first, second):
            scheduler.end(request, Outcome(Status.ABORTED))
        assert scheduler.cache.pool.free_count == scheduler.limits.total_blocks
        assert scheduler.counters.hits == scheduler.counters.skipped_tokens == 0

    @pytest.fixture(autouse=True)
    def no_hashing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object, **kwargs: object) -> None:
            raise RuntimeError("hashed")

        monkeypatch.setattr(hash_chain, "blake2b", refuse)

    def test_without_a_policy(self):
        """KV-8."""
        self.live(Scheduler(make_limits(total_blocks=16), None))

    @pytest.mark.parametrize("policy", [LRU, REF_ZERO])
    def test_for_requests_that_opt_out(self, policy):
        """KV-9."""
        self.live(Scheduler(make_limits(total_blocks=16), policy), enable_prefix_caching=False)

    def test_otherwise_it_would_be_noticed(self):
        """Negative control."""
        with pytest.raises(RuntimeError, match="hashed"):
            self.live(Scheduler(make_limits(total_blocks=16), LRU))
