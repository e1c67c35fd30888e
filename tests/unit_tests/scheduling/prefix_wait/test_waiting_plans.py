"""KV-6: random sequences of many waiting requests are planned as if all were looked at in every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.planner import reason_to_refuse
from megatron_ext.scheduling.prefix_wait.waiting_queue import Line, WaitingQueue
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.brute_force import assert_same_plan, plan_by_looking_at_all
from tests.unit_tests.scheduling.builders import commit

# The order in which unused blocks are evicted is not tested here.
POLICIES = [EvictionPolicyName.LRU, EvictionPolicyName.REF_ZERO]


LIVES, MOST_LIVES = 8, 40  # seeds of each kind; a planted mistake may need more
STEPS = 60
MAX_ALIVE = 30


class Life:
    """Scheduler with random limits and random events."""

    def __init__(self, seed: int, has_states: bool) -> None:
        self.random = random.Random(seed)
        draw = self.random.choice
        slots = draw([2, 4, 12])
        self.block_size = draw([1, 2, 3])
        limits = SchedulerLimits(
            block_size=self.block_size,
            total_blocks=draw([15, 30, 60, 120]),
            paused_blocks=draw([None, 0, 3]),
            max_requests=slots,
            max_tokens=max(slots, self.block_size) + draw([1, 2, 4, 12, 40]),
            max_sequence_length=60,
            chunked_prefill=(chunked := draw([True, True, True, False])),
            aligned_chunks=has_states and chunked and draw([True, False]),
        )
        slots = draw([0, 1, 2, 4, 12]) if has_states else None
        self.scheduler = Scheduler(limits, draw(POLICIES), b"model", slots)
        self.arrivals = self.slept = 0

    def arrive(self) -> None:
        source = self.random
        length = source.choice([9, 25, 40, 50, 6 * self.block_size, 12 * self.block_size])
        family = 2 * (self.arrivals // 20)  # nothing of which is cached when the first of them comes
        tokens = [family + int(source.random() < 0.03) for _ in range(length)]  # long equal beginnings
        params = RequestParams(
            num_tokens_to_generate=source.choice([1, 1, 2, 6]),
            cache_salt=source.choice([None] * 6 + ["x"]),
            enable_prefix_caching=source.random() > 0.05,
            return_log_probs=source.random() < 0.1,
        )
        request = Request(self.arrivals, RequestInputs(tuple(tokens), params), arrival=self.arrivals, seed=0)
        if reason_to_refuse(request, self.scheduler.limits) is None:
            self.arrivals += 1
            self.scheduler.add(request)

    def disturb(self) -> None:
        """Abort, suspend, reset, new weights; the last three rarely."""
        scheduler, source = self.scheduler, self.random
        living = list(scheduler.queues)
        if living and source.random() < 0.15:
            scheduler.end(source.choice(living), Outcome(Status.ABORTED))
        if source.random() < 0.04:
            changed = partial(scheduler.weights_changed, restarts=False)
            source.choice([scheduler.suspend, scheduler.reset_prefix_cache, changed])()
        scheduler.check()

    def step(self) -> None:
        scheduler = self.scheduler
        sleepers = {request for request, _ in scheduler.queues.waiting.sleepers()}
        self.slept += len(sleepers)
        brute = plan_by_looking_at_all(scheduler)
        plan = scheduler.schedule()
        assert_same_plan(plan, brute, sleepers)
        scheduler.check()
        assert plan.chunks or not len(scheduler.queues), "requests are alive, but none can run"
        if self.random.random() < 0.05:
            scheduler.abandon(plan.chunks, "planted")
            scheduler.check()
            return
        due = [chunk.request.request_id for chunk in plan.chunks if chunk.yields_token]
        commit(scheduler, plan, {request_id: int(self.random.random() < 0.12) for request_id in due})
        scheduler.check()

    def run(self) -> None:
        for _ in range(STEPS):
            for _ in range(self.random.choice([0] * 9 + [1, 10])):
                if len(self.scheduler.queues) < MAX_ALIVE:
                    self.arrive()
            self.disturb()
            self.step()
        for _ in range(40 * STEPS):
            if not len(self.scheduler.queues):
                break
            self.step()
        assert not len(self.scheduler.queues), "requests never end"
        assert not self.scheduler.cache.wanted(), "blocks are kept without a waiting request"


def run_lives(has_states: bool, seeds: Iterable[int]) -> int:
    """Count how often a request was asleep in a step."""
    slept = 0
    for seed in seeds:
        life = Life(seed, has_states)
        life.run()
        slept += life.slept
    return slept


@pytest.mark.parametrize("has_states", [False, True])
def test_plans_equal_those_that_examine_every_waiting_request(has_states):
    """KV-6, KV-13: some request sleeps in most steps, or the test would show nothing."""
    assert run_lives(has_states, range(LIVES)) > 5 * LIVES


# Negative controls


def sleeps_through_a_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "published", lambda self, block_hash: None)


def sleeps_through_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitingQueue, "forget", lambda self: None)


def is_not_disturbed_by_new_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "join", lambda self, requests, *, only_later: None)


@pytest.mark.parametrize(
    ("plant", "first"),  # with the seed that finds it
    [
        (sleeps_through_a_publication, 0),
        (sleeps_through_a_reset, 27),
        (is_not_disturbed_by_new_leaders, 10),
    ],
)
def test_a_planted_mistake_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_lives(True, (first, *range(MOST_LIVES)))
