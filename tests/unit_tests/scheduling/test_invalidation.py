"""EX-4, EX-3: blocks from before a reset, or of other weights, models or tenants, are not matched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import add, admitted, commit, make_limits, request_of, step

LRU, REF_ZERO = EvictionPolicyName.LRU, EvictionPolicyName.REF_ZERO
PROMPT = range(12)
INVALIDATIONS = [
    Scheduler.reset_prefix_cache,
    partial(Scheduler.weights_changed, restarts=False),
    partial(Scheduler.weights_changed, restarts=True),
    Scheduler.suspend,
]
Invalidate = Callable[[Scheduler], None]


def make_scheduler(policy: EvictionPolicyName = LRU, slots: int | None = None, **limits: object) -> Scheduler:
    return Scheduler(make_limits(**{"total_blocks": 20} | limits), policy, b"model", slots)


def cached_tokens(scheduler: Scheduler, tokens: object = PROMPT, **params: object) -> int:
    """Number of `tokens` that a new request would match."""
    probe = request_of(99, tokens, **params)
    scheduler.add(probe)
    matched = scheduler.cache.match(probe.block_hashes)
    scheduler.queues.discard(probe)
    return len(matched) * scheduler.limits.block_size


@pytest.mark.parametrize("invalidate", INVALIDATIONS)
@pytest.mark.parametrize("slots", [None, 4])
def test_old_blocks_are_not_matched_after_a_reset(invalidate: Invalidate, slots: int | None):
    """EX-4: blocks computed after the reset are matched."""
    scheduler = make_scheduler(slots=slots)
    for arrival in (0, 1):
        request = request_of(arrival, PROMPT)
        add(scheduler, request)
        assert admitted(step(scheduler)) == [(arrival, 0, 3)]
        assert request.ledger.skipped == 0
        scheduler.end(request, Outcome(Status.COMPLETED))
        assert cached_tokens(scheduler) == 12
        invalidate(scheduler)
        scheduler.check()
        use = scheduler.cache.use()
        assert (use.blocks_cached, use.slots_used, cached_tokens(scheduler)) == (0, 0, 0)
        assert scheduler.cache.pool.free_count == 20


class TestInFlight:
    """A request that has begun before a reset."""

    @pytest.mark.parametrize("invalidate", INVALIDATIONS[:2])
    def test_not_even_the_step_that_is_being_computed(self, invalidate: Invalidate):
        """EX-4: a reset between a step's plan and its end."""
        for slots in (None, 4):
            scheduler = make_scheduler(slots=slots)
            add(scheduler, request_of(0, PROMPT))
            plan = scheduler.schedule()
            invalidate(scheduler)
            commit(scheduler, plan)
            use = scheduler.cache.use()
            assert (use.blocks_cached, use.slots_used) == (0, 0)


class TestKeys:
    """KV-1: keys contain everything on which the KV of equal tokens depends."""

    @staticmethod
    def root(scheduler: Scheduler, **params: object) -> BlockHash:
        request = request_of(0, PROMPT, **params)
        scheduler.add(request)
        return request.chain.root

    def test_each_of_model_weights_block_size_and_salt_makes_another_key(self):
        """KV-1, EX-3, EX-4."""
        other_weights = make_scheduler()
        other_weights.weights_changed(restarts=True)
        later_weights = make_scheduler()
        later_weights.weights_changed(restarts=True)
        later_weights.weights_changed(restarts=True)
        roots = [
            self.root(make_scheduler()),
            self.root(Scheduler(make_limits(), LRU, b"another model")),
            self.root(Scheduler(make_limits(), LRU, b"")),
            self.root(make_scheduler(block_size=2)),
            self.root(other_weights),
            self.root(later_weights),
            *(self.root(make_scheduler(), cache_salt=salt) for salt in ("", "a", "b", "model", "\x00")),
        ]
        assert len(set(roots)) == len(roots)
        assert self.root(make_scheduler()) == roots[0]
        assert self.root(make_scheduler(), cache_salt="a", num_tokens_to_generate=1, temperature=1.0) == roots[7]

    def test_any_text_is_a_salt(self):
        """EX-3: JSON can spell halves of characters, and two of them are two tenants."""
        salts = ["\ud800", "\ud801", "?", "\ufffd"]
        roots = {self.root(make_scheduler(), cache_salt=salt) for salt in salts}
        assert len(roots) == len(salts)


@pytest.mark.parametrize(("own", "dropped"), [(2, 0), (5, 1)])
def test_a_wrong_snapshot_takes_along_what_was_computed_from_it(own: int, dropped: int):
    """EX-15: blocks after it, and requests that go on from it, whose blocks may not be complete yet."""
    scheduler = make_scheduler(slots=4)
    add(scheduler, request_of(0, range(9), num_tokens_to_generate=1))
    step(scheduler)
    add(scheduler, second := request_of(1, [*range(8), *range(90, 90 + own)]))
    (chunk,) = step(scheduler).chunks
    assert chunk.start == 8
    assert scheduler.quarantine(second.block_hashes[1], states_only=True) == dropped
    assert second in scheduler.queues.waiting
    assert cached_tokens(scheduler, second.tokens) == 8
    scheduler.check()


@pytest.mark.parametrize("states_only", [False, True])
def test_a_wrong_entry_leaves_memory_before_the_tier_below_may_fail(states_only: bool):
    """EX-15: what is left would be used again."""
    scheduler = make_scheduler(slots=4)
    add(scheduler, first := request_of(0, range(9), num_tokens_to_generate=1))
    step(scheduler)
    scheduler.cache.lower_tier = SimpleNamespace(quarantine=None, on_evicted=lambda _: None)
    wrong = first.block_hashes[1]
    assert scheduler.cache.states.find(wrong) is not None
    with pytest.raises(TypeError):
        scheduler.quarantine(wrong, states_only=states_only)
    assert scheduler.cache.states.find(wrong) is None
    scheduler.check()
