"""Steps decided beside a cache, in literal situations: blocks of 4 tokens, requests named by their tokens."""

from __future__ import annotations

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import (
    add,
    admitted,
    cache_blocks_with_snapshots,
    make_limits,
    request_of,
    step,
)

LRU, REF_ZERO = EvictionPolicyName.LRU, EvictionPolicyName.REF_ZERO


def test_a_new_request_leaves_snapshots_alone_while_another_runs():
    """HY-5: it waits although their memory could be had, until it is alone."""
    scheduler = Scheduler(make_limits(total_blocks=8, max_tokens=32, slabs=SlabLayout(4, 2)), LRU)
    cache = scheduler.cache
    cache_blocks_with_snapshots(cache, 2)
    add(scheduler, request_of(0, range(3), num_tokens_to_generate=2))
    assert admitted(step(scheduler)) == [(0, 0, 1)]
    add(scheduler, request_of(1, range(50, 78), num_tokens_to_generate=1))
    plan = step(scheduler)
    assert (plan.deferrals[-1].resource, plan.deferrals[-1].needed, plan.deferrals[-1].available) == ("blocks", 7, 5)
    assert cache.available_count >= 7
    assert admitted(step(scheduler)) == [(1, 0, 7)]


def test_a_prompt_uses_what_an_earlier_one_left():
    """HY-5: its own blocks and snapshots count when a later one contains them."""
    scheduler = Scheduler(make_limits(total_blocks=8, slabs=SlabLayout(4, 2)), LRU)
    reuse = scheduler.cache.shared_memory.reuse
    for arrival in range(2):
        request = request_of(arrival, range(9), num_tokens_to_generate=1)
        add(scheduler, request)
        step(scheduler)
        assert request.is_ended
        assert (reuse.of_blocks == 1, reuse.of_snapshots == 1) == (arrival > 0, arrival > 0)


def with_a_moved_block() -> tuple[Scheduler, Request, Request]:
    """Return a scheduler whose next step copies a block of the first of two running requests."""
    scheduler = Scheduler(make_limits(slabs=SlabLayout(3, 2), total_blocks=6), LRU)
    requests = [request_of(arrival, range(9 * arrival, 9 * arrival + 3)) for arrival in range(4)]
    add(scheduler, *requests)
    step(scheduler)
    for request in requests[1:3]:  # of different slabs
        scheduler.end(request, Outcome(Status.ABORTED))
    for name in (b"x", b"y"):  # a free slab each
        assert scheduler.cache.states.reserve(BlockHash(name * 32)) is not None
    return scheduler, requests[0], requests[3]


def test_the_block_table_of_a_running_request_follows_a_move():
    """HY-5."""
    scheduler, moved, other = with_a_moved_block()
    assert scheduler.cache.changes.block_copies == ((0, 2),)
    assert (moved.block_table, other.block_table) == ((2,), (3,))


def test_a_failed_step_that_was_to_move_blocks_leaves_no_request_as_it_was():
    """HY-5: a copy that may not have been made leaves contents undefined that are not of the step's requests."""
    scheduler, moved, other = with_a_moved_block()
    plan = scheduler.schedule()
    scheduler.cache.note_changes_sent()
    assert moved.computed_end
    scheduler.abandon([chunk for chunk in plan.chunks if chunk.request is other], "failed")
    assert not moved.computed_end
    assert not moved.block_table
    scheduler.check()
