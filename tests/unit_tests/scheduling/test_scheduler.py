"""Lives of requests in literal steps, and corruptions that `check` must find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
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


class TestLife:
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

    def test_commit_refuses_a_chunk_out_of_place(self):
        scheduler, _ = make_scheduler(5)
        plan = scheduler.schedule()
        message = describe_step(plan.chunks, 4)
        scheduler.commit(message, {100: 7})
        with pytest.raises(AssertionError, match="has another position"):
            scheduler.commit(message, {100: 7})


def leak_a_block(scheduler: Scheduler) -> None:
    scheduler.cache.pool.allocate(1)


def share_a_block(scheduler: Scheduler) -> None:
    first, second, *_ = scheduler.queues.running
    second.block_table = (first.block_table[0], *second.block_table[1:])


def own_too_few_blocks(scheduler: Scheduler) -> None:
    prefilling = next(request for request in scheduler.queues.running if not request.is_decoding)
    scheduler.cache.pool.release(prefilling.block_table[-1:])
    prefilling.block_table = prefilling.block_table[:-1]


def leak_a_live_slot(scheduler: Scheduler) -> None:
    scheduler.running_slots.take()


def end_without_leaving(scheduler: Scheduler) -> None:
    next(iter(scheduler.queues.waiting)).end(Outcome(Status.ABORTED))


def wait_with_computed_tokens(scheduler: Scheduler) -> None:
    next(iter(scheduler.queues.waiting)).computed_end = 1


def be_in_two_queues(scheduler: Scheduler) -> None:
    scheduler.queues.paused.add(next(iter(scheduler.queues.running)))


def get_no_token(scheduler: Scheduler) -> None:
    next(request for request in scheduler.queues.running if request.is_decoding).tokens.pop()


def jump_the_queue(scheduler: Scheduler) -> None:
    scheduler.queues.running._requests.reverse()


CORRUPTIONS = [
    leak_a_block,
    share_a_block,
    own_too_few_blocks,
    leak_a_live_slot,
    end_without_leaving,
    wait_with_computed_tokens,
    be_in_two_queues,
    get_no_token,
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
