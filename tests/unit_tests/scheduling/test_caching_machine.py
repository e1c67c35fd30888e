"""KV-2 to KV-6, KV-13, SC-5, EX-1 to EX-4, EX-8: any life of requests that share prefixes, and what would break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings

from megatron_ext.prefix_cache.block_pool import BlockId, BlockPool
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling import planner, scheduler
from megatron_ext.scheduling.accounting import PrefillLedger
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks
from megatron_ext.scheduling.publication import publish_blocks
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.caching_machine import CachingMachine
from tests.unit_tests.support.planted import assert_found

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


def ref_zero_keeps_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PrefixCache.__init__

    def keep_unused(self: PrefixCache, *arguments: object, **options: object) -> None:
        begin(self, *arguments, **options)
        self._keeps_unused = True

    monkeypatch.setattr(PrefixCache, "__init__", keep_unused)


def shares_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the last block of a matched run without a reference."""
    retain = BlockPool.retain
    monkeypatch.setattr(BlockPool, "retain", lambda self, blocks: retain(self, blocks[:-1]))


def hits_one_block_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block that is matched is taken for one more, of other contents."""
    match = PrefixCache.match

    def stretch(self: PrefixCache, block_hashes: Sequence[bytes]) -> list[BlockId]:
        blocks = match(self, block_hashes)
        stranger = next((block for block in self.unused if block not in blocks), None)
        return [*blocks, stranger] if stranger is not None and len(blocks) < len(block_hashes) else blocks

    monkeypatch.setattr(PrefixCache, "match", stretch)


def ignores_the_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    root = scheduler.root_hash
    monkeypatch.setattr(scheduler, "root_hash", lambda fields: root(fields[:3]))


def skips_tokens_whose_scores_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "reads_cache", lambda request: request.chain is not None)


def writes_shared_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Scheduler._admit

    def forget_what_is_shared(self: Scheduler, admission: Admission) -> None:
        admit(self, admission)
        admission.request.shared_end = 0

    monkeypatch.setattr(Scheduler, "_admit", forget_what_is_shared)


def mourns_a_leader_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingBlocks, "discard", lambda self, request_id: None)


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


def survives_a_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    def suspend(self: Scheduler) -> None:
        for request in [*self.queues.running, *self.queues.paused]:
            self._requeue(request)

    monkeypatch.setattr(Scheduler, "suspend", suspend)


def gives_prefill_one_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    continuations = planner.plan_continuations
    monkeypatch.setattr(
        planner, "plan_continuations", lambda begun, limits, tokens: continuations(begun, limits, tokens + 1)
    )


def counts_what_is_computed_again_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Request.advance

    def forgetful(self: Request, end: int) -> int:
        self.ledger.known_end = self.computed_end
        return advance(self, end)

    monkeypatch.setattr(Request, "advance", forgetful)


@pytest.mark.long
@pytest.mark.parametrize(
    "plant",
    [
        forgets_that_matches_are_pinned,
        publishes_a_failed_step,
        releases_parents_first,
        ref_zero_keeps_blocks,
        shares_without_a_reference,
        hits_one_block_too_many,
        ignores_the_salt,
        skips_tokens_whose_scores_are_wanted,
        writes_shared_blocks,
        mourns_a_leader_for_ever,
        counts_skipped_tokens_at_each_admission,
        publishes_what_began_before_a_reset,
        survives_a_suspend,
        gives_prefill_one_token_too_many,
        counts_what_is_computed_again_as_new,
    ],
)
def test_the_machine_finds_a_planted_mistake(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    assert_found(CachingMachine, IndexError)  # of a block that was not matched
