"""Lives of requests in literal steps, and corruptions that `check` must find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from tests.unit_tests.scheduling.builders import make_limits, make_request, step


def make_scheduler(*prompts: int, **limits: object) -> tuple[Scheduler, list[Request]]:
    """A scheduler with waiting requests 0, 1, ... of these prompt lengths."""
    scheduler = Scheduler(make_limits(**limits))
    requests = [make_request(arrival, prompt) for arrival, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add(request)
    return scheduler, requests


def event_names(request: Request) -> list[str]:
    return [event.type.name for event in request.timeline.events]


class TestLife:
    def test_blocks_and_rows_are_owned_from_admission_to_end(self):
        scheduler, (first, second) = make_scheduler(5, 4)
        step(scheduler)
        assert (first.block_table, first.running_slot) == ((0, 1), 0)
        assert (second.block_table, second.running_slot) == ((2,), 1)
        step(scheduler)
        assert second.block_table == (2, 3)  # its token 4 begins a block
        scheduler.end(first, Outcome(Status.COMPLETED, finish_reason="stop"))
        assert (first.block_table, first.running_slot, first.computed_end) == ((), None, 0)
        assert (scheduler.blocks.free_count, scheduler.running_slots.free_count) == (6, 3)
        scheduler.check()

    def test_a_chunked_prefill_is_admitted_once(self):
        """KV-10: ADD_CONTEXT is each admission, not each chunk."""
        scheduler, (request,) = make_scheduler(30)
        assert [(chunk.start, chunk.end) for chunk in step(scheduler).chunks] == [(0, 16)]
        assert request.generated_tokens == []
        assert [(chunk.start, chunk.end) for chunk in step(scheduler).chunks] == [(16, 30)]
        assert event_names(request) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN"]

    def test_pause_and_resume_keep_computed_tokens(self):
        """KV-10: a request that gets its block at once is not paused."""
        scheduler, (first, second) = make_scheduler(4, 4, total_blocks=3)
        step(scheduler)
        step(scheduler)  # both want a block, one is there
        assert event_names(first) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN"]
        assert event_names(second) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "PAUSE"]
        assert (second.block_table, second.computed_end) == ((1,), 4)
        scheduler.end(first, Outcome(Status.COMPLETED))
        assert [chunk.request for chunk in step(scheduler).chunks] == [second]
        assert second.computed_end == 5
        assert scheduler.counters.pauses == 1
        assert scheduler.counters.preemptions == 0

    def test_preempt_and_admit_again(self):
        scheduler, (first, second) = make_scheduler(4, 4, total_blocks=2)
        step(scheduler)
        plan = step(scheduler)
        assert plan.preemptions == (second,)
        assert (second.computed_end, second.block_table, second.running_slot) == (0, (), None)
        assert len(second.generated_tokens) == 1
        scheduler.end(first, Outcome(Status.COMPLETED))
        plan = step(scheduler)
        assert [(chunk.start, chunk.end) for chunk in plan.chunks] == [(0, 5)]
        assert event_names(second) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "EVICT", "ADD_CONTEXT"]
        assert (second.ledger.computed, second.ledger.recomputed) == (4, 4)

    @pytest.mark.parametrize(("prompt", "tokens"), [(5, 4), (7, 2), (8, 1)])
    @pytest.mark.parametrize("is_suspended", [False, True])
    def test_a_request_ends_by_length_where_the_pool_ends(self, prompt: int, tokens: int, is_suspended: bool):
        """KV-12: two blocks hold 8 tokens; the last token needs no place."""
        scheduler, (request, neighbour) = make_scheduler(prompt, 2, total_blocks=2)
        for _ in range(20):
            if not request.is_ended:
                step(scheduler)
                if is_suspended:
                    scheduler.suspend()
        assert (request.status, request.finish_reason) == (Status.COMPLETED, "length")
        assert request.generated_count == tokens
        plan = step(scheduler)
        assert [chunk.request for chunk in plan.chunks] == [neighbour]

    def test_an_abandoned_step_publishes_nothing_and_is_done_again(self):
        """KV-5: a failed forward leaks nothing."""
        scheduler, (running, fresh) = make_scheduler(5, 3, max_tokens=5)
        step(scheduler)
        plan = scheduler.schedule()
        assert [chunk.request for chunk in plan.chunks] == [running, fresh]
        scheduler.abandon(plan.chunks, "RuntimeError: out of memory")
        scheduler.check()
        assert scheduler.blocks.free_count == 8
        assert scheduler.running_slots.free_count == 4
        assert (running.ledger.computed, fresh.ledger.computed) == (5, 0)
        assert running.timeline.events[-1].type is EventType.ERROR_TRANSIENT
        assert running.timeline.events[-1].payload == "RuntimeError: out of memory"
        assert list(scheduler.queues.waiting) == [running, fresh]
        plan = scheduler.schedule()
        assert [(chunk.request, chunk.start, chunk.end) for chunk in plan.chunks] == [(running, 0, 5)]

    def test_requests_outside_an_abandoned_step_keep_their_blocks(self):
        scheduler, (first, paused) = make_scheduler(4, 4, total_blocks=3)
        step(scheduler)
        step(scheduler)
        plan = scheduler.schedule()
        assert [chunk.request for chunk in plan.chunks] == [first]
        scheduler.abandon(plan.chunks, "planted")
        scheduler.check()
        assert (paused.block_table, paused.computed_end) == ((1,), 4)
        assert (first.block_table, first.computed_end) == ((), 0)

    @pytest.mark.parametrize("when", ["waiting", "mid-prefill", "decoding", "paused"])
    def test_abort_at_any_moment(self, when: str):
        """EX-8: blocks and slots are free at once."""
        scheduler, (first, second) = make_scheduler(4, 8, total_blocks=4, max_tokens=6)
        if when != "waiting":
            step(scheduler)  # 4 of the first, 2 of the second
        if when in ("decoding", "paused"):
            step(scheduler)  # 1 of the first, 5 of the second
            step(scheduler)  # 1 of the first, 1 of the second
            assert second.is_decoding
        if when == "paused":
            step(scheduler)
            assert second in scheduler.queues.paused
        scheduler.end(second, Outcome(Status.ABORTED))
        scheduler.check()
        assert second.block_table == ()
        assert second.running_slot is None
        used = len(first.block_table)
        assert scheduler.blocks.free_count == 4 - used
        assert second.is_ended

    def test_suspended_requests_wait_again_with_their_tokens(self):
        scheduler, requests = make_scheduler(5, 30, 2)
        step(scheduler)
        step(scheduler)
        tokens = [list(request.tokens) for request in requests]
        scheduler.suspend()
        scheduler.check()
        assert list(scheduler.queues.waiting) == requests
        assert [request.tokens.tolist() for request in requests] == tokens
        assert scheduler.blocks.free_count == 8
        assert "EVICT" not in event_names(requests[0])

    def test_commit_refuses_a_chunk_out_of_place(self):
        scheduler, _ = make_scheduler(5)
        plan = scheduler.schedule()
        message = describe_step(plan.chunks, 4)
        scheduler.commit(message, {100: 7})
        with pytest.raises(AssertionError, match="has another position"):
            scheduler.commit(message, {100: 7})


def leak_a_block(scheduler: Scheduler) -> None:
    scheduler.blocks.allocate(1)


def share_a_block(scheduler: Scheduler) -> None:
    first, second, *_ = scheduler.queues.running
    second.block_table = (first.block_table[0], *second.block_table[1:])


def forget_a_block(scheduler: Scheduler) -> None:
    sequence = next(iter(scheduler.queues.running))
    sequence.block_table = sequence.block_table[:-1]


def hoard_a_block(scheduler: Scheduler) -> None:
    next(iter(scheduler.queues.running)).block_table += tuple(scheduler.blocks.allocate(1))


def own_too_few_blocks(scheduler: Scheduler) -> None:
    prefilling = next(request for request in scheduler.queues.running if not request.is_decoding)
    scheduler.blocks.release(prefilling.block_table[-1:])
    prefilling.block_table = prefilling.block_table[:-1]


def share_a_live_slot(scheduler: Scheduler) -> None:
    first, second, *_ = scheduler.queues.running
    second.running_slot = first.running_slot


def lose_a_live_slot(scheduler: Scheduler) -> None:
    next(iter(scheduler.queues.running)).running_slot = None


def leak_a_live_slot(scheduler: Scheduler) -> None:
    scheduler.running_slots.take()


def run_without_a_live_slot(scheduler: Scheduler) -> None:
    request = next(iter(scheduler.queues.running))
    scheduler.running_slots.give_back(request.running_slot)
    request.running_slot = None


def end_without_leaving(scheduler: Scheduler) -> None:
    next(iter(scheduler.queues.waiting)).end(Outcome(Status.ABORTED))


def wait_with_blocks(scheduler: Scheduler) -> None:
    next(iter(scheduler.queues.waiting)).block_table = tuple(scheduler.blocks.allocate(1))


def wait_with_a_live_slot(scheduler: Scheduler) -> None:
    next(iter(scheduler.queues.waiting)).running_slot = scheduler.running_slots.take()


def wait_with_computed_tokens(scheduler: Scheduler) -> None:
    next(iter(scheduler.queues.waiting)).computed_end = 1


def be_in_two_queues(scheduler: Scheduler) -> None:
    scheduler.queues.paused.add(next(iter(scheduler.queues.running)))


def get_no_token(scheduler: Scheduler) -> None:
    next(request for request in scheduler.queues.running if request.is_decoding).tokens.pop()


def pause_within_prefill(scheduler: Scheduler) -> None:
    prefilling = next(request for request in scheduler.queues.running if not request.is_decoding)
    scheduler.queues.move(prefilling, scheduler.queues.paused)


def jump_the_queue(scheduler: Scheduler) -> None:
    scheduler.queues.running._requests.reverse()


CORRUPTIONS = [
    leak_a_block,
    share_a_block,
    forget_a_block,
    hoard_a_block,
    own_too_few_blocks,
    share_a_live_slot,
    lose_a_live_slot,
    leak_a_live_slot,
    run_without_a_live_slot,
    end_without_leaving,
    wait_with_blocks,
    wait_with_a_live_slot,
    wait_with_computed_tokens,
    be_in_two_queues,
    get_no_token,
    pause_within_prefill,
    jump_the_queue,
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
def test_check_finds(corrupt: Callable[[Scheduler], None]):
    scheduler, (decoding, prefilling, waiting) = make_scheduler(3, 20, 30, total_blocks=10)
    step(scheduler)
    assert decoding.is_decoding
    assert 0 < prefilling.computed_end < 20
    assert waiting in scheduler.queues.waiting
    scheduler.check()
    corrupt(scheduler)
    with pytest.raises(AssertionError):
        scheduler.check()
