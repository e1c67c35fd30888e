"""KV-2 to KV-6, KV-13, SC-5, EX-1 to EX-4, EX-8: any life of requests that share prefixes, and what would break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings

from megatron_ext.prefix_cache import matching
from megatron_ext.prefix_cache.block_pool import BlockId, BlockPool
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.eviction import LeafFirstLru
from megatron_ext.scheduling import block_hasher, planner, scheduler
from megatron_ext.scheduling.accounting import PrefillLedger
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission, StepPlan
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks
from megatron_ext.scheduling.publication import publish_blocks
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.scheduling.scheduler import Scheduler
from tests.priority import TestPriority
from tests.unit_tests.scheduling.caching_machine import CachingMachine
from tests.unit_tests.support.planted import assert_found

pytestmark = pytest.mark.priority(TestPriority.HIGH)

COMMON = {
    "deadline": None,
    "stateful_step_count": 20,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
    "database": None,
}
CachingMachine.TestCase.settings = settings(
    max_examples=12, phases=[Phase.generate, Phase.shrink], print_blob=True, **COMMON
)
TestCaching = CachingMachine.TestCase


# Negative controls: a scheduler with one mistake, and the machine must object.


def forgets_that_matches_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "is_evictable", lambda self, block: False)


def publishes_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    abandon = Scheduler.abandon

    def publish_and_abandon(self: Scheduler, chunks: Sequence[Chunk], reason: str) -> None:
        for chunk in chunks:
            chunk.request.computed_end = chunk.end
            publish_blocks(chunk.request, self.limits.block_size, self.cache, self.pending_blocks, self.queues.waiting)
        abandon(self, chunks, reason)

    monkeypatch.setattr(Scheduler, "abandon", publish_and_abandon)


def releases_parents_first(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PrefixCache.release
    monkeypatch.setattr(PrefixCache, "release", lambda self, table, used=(): release(self, list(table)[::-1], used))


def evicts_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict_newest(self: LeafFirstLru, count: int, *_: object) -> list[BlockId]:
        blocks = [self._queue.popitem(last=True)[1] for _ in range(count)]
        for block in blocks:
            del self._times[block]
        return blocks

    monkeypatch.setattr(LeafFirstLru, "evict", evict_newest)


def ref_zero_keeps_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PrefixCache.__init__

    def keep_unused(self: PrefixCache, *arguments: object, **options: object) -> None:
        begin(self, *arguments, **options)
        self._keeps_unused = True

    monkeypatch.setattr(PrefixCache, "__init__", keep_unused)


def swaps_duplicates_and_keeps_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the second publisher use the first one's blocks without releasing its own."""
    publish, release = PrefixCache.publish, BlockPool.release

    def publish_and_lose(self: PrefixCache, *run: object) -> tuple[BlockId, ...]:
        monkeypatch.setattr(BlockPool, "release", lambda pool, blocks: None)
        shared = publish(self, *run)
        monkeypatch.setattr(BlockPool, "release", release)
        return shared

    monkeypatch.setattr(PrefixCache, "publish", publish_and_lose)


def shares_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the last block of a matched run without a reference."""
    retain = BlockPool.retain
    monkeypatch.setattr(BlockPool, "retain", lambda self, blocks: retain(self, blocks[:-1]))


def hits_one_block_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block that is matched is taken for one more, of other contents."""
    match = PrefixCache.match

    def stretch(self: PrefixCache, block_hashes: Sequence[bytes]) -> list[BlockId]:
        blocks = match(self, block_hashes)
        stranger = next((block for block in self._unused if block not in blocks), None)
        return [*blocks, stranger] if stranger is not None and len(blocks) < len(block_hashes) else blocks

    monkeypatch.setattr(PrefixCache, "match", stretch)


def ignores_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    root = block_hasher.root_hash
    monkeypatch.setattr(block_hasher, "root_hash", lambda fields: root(fields[:3]))


def skips_tokens_whose_scores_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "reads_cache", lambda request: request.chain is not None)


def writes_shared_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Scheduler._admit

    def forget_what_is_shared(self: Scheduler, admission: Admission) -> None:
        admit(self, admission)
        admission.request.shared_end = 0

    monkeypatch.setattr(Scheduler, "_admit", forget_what_is_shared)


def resumes_a_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "resume_position", lambda length, matched: min(matched + 1, length - 1))


def mourns_a_leader_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingBlocks, "discard", lambda self, request_id: None)


def has_no_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "wait_for_prefix", lambda *args: None)


def counts_skipped_tokens_at_each_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = PrefillLedger.admit

    def admit_afresh(self: PrefillLedger, *args: object) -> int:
        self.known_end = 0
        return admit(self, *args)

    monkeypatch.setattr(PrefillLedger, "admit", admit_afresh)


def publishes_what_began_before_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = PrefixCache.reset

    def stay_in_the_epoch(self: PrefixCache) -> None:
        reset(self)
        self.epoch -= 1

    monkeypatch.setattr(PrefixCache, "reset", stay_in_the_epoch)


def keeps_old_keys_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    def change_weights(self: Scheduler, *, restarts: bool) -> None:
        self._keys.weights_changed()
        if restarts:
            self.suspend()
        self.reset_prefix_cache()

    monkeypatch.setattr(Scheduler, "weights_changed", change_weights)


def survives_a_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    def suspend(self: Scheduler) -> None:
        for request in [*self.queues.running, *self.queues.paused]:
            self._requeue(request)

    monkeypatch.setattr(Scheduler, "suspend", suspend)


class NeverSeen(list):
    """List that claims to be empty when tested for truth."""

    def __bool__(self) -> bool:
        return False


def admits_in_a_step_that_preempts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_growth = planner._plan_growth

    def hide(*args: object) -> SimpleNamespace:
        growth = plan_growth(*args)
        return SimpleNamespace(**(vars(growth) | {"preempted": NeverSeen(growth.preempted)}))

    monkeypatch.setattr(planner, "_plan_growth", hide)


def gives_prefill_one_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    continuations = planner.plan_continuations
    monkeypatch.setattr(
        planner, "plan_continuations", lambda begun, limits, tokens: continuations(begun, limits, tokens + 1)
    )


def keeps_blocks_when_preempting(monkeypatch: pytest.MonkeyPatch) -> None:
    def requeue(self: Scheduler, request: Request, event: EventType | None = None, payload: str | None = None) -> None:
        request.block_table, request.computed_end = (), 0  # forgets to release
        self.running_slots.give_back(request.running_slot)
        request.running_slot = None
        self.queues.move(request, self.queues.waiting)
        if event is not None:
            request.timeline.note(event, payload)

    monkeypatch.setattr(Scheduler, "_requeue", requeue)


def counts_what_is_computed_again_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Request.advance

    def forgetful(self: Request, end: int) -> int:
        self.ledger.known_end = self.computed_end
        return advance(self, end)

    monkeypatch.setattr(Request, "advance", forgetful)


def lets_requests_outgrow_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "end_within", lambda self, length: None)


def puts_prefills_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_step = planner.plan_step

    def reverse(*args: object, **others: object) -> StepPlan:
        plan = plan_step(*args, **others)
        return StepPlan(**(vars(plan) | {"chunks": plan.chunks[::-1]}))

    monkeypatch.setattr(planner, "plan_step", reverse)
    monkeypatch.setattr(scheduler, "plan_step", reverse)


@pytest.mark.long
@pytest.mark.priority(TestPriority.MEDIUM)
@pytest.mark.parametrize(
    "plant",
    [
        forgets_that_matches_are_pinned,
        publishes_a_failed_step,
        releases_parents_first,
        evicts_the_newest,
        ref_zero_keeps_blocks,
        swaps_duplicates_and_keeps_both,
        shares_without_a_reference,
        hits_one_block_too_many,
        ignores_the_salt,
        skips_tokens_whose_scores_are_wanted,
        writes_shared_blocks,
        resumes_a_token_late,
        mourns_a_leader_for_ever,
        has_no_followers,
        counts_skipped_tokens_at_each_admission,
        publishes_what_began_before_a_reset,
        keeps_old_keys_in_the_queue,
        survives_a_suspend,
        admits_in_a_step_that_preempts,
        gives_prefill_one_token_too_many,
        keeps_blocks_when_preempting,
        counts_what_is_computed_again_as_new,
        lets_requests_outgrow_the_pool,
        puts_prefills_first,
    ],
)
def test_the_machine_finds_a_planted_mistake(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    quick = settings(max_examples=1500, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False, **COMMON)
    assert_found(CachingMachine, quick, IndexError)  # of a block that was not matched
