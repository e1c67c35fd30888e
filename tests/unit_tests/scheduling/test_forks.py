"""KV-6: which samples of a group take over a prompt, and what they own then. `mcore/test_forks.py` has their tokens."""

from __future__ import annotations

import pytest

from megatron_ext.scheduling.plan import StepPlan
from tests.unit_tests.scheduling.test_async_planning import Planned

GROUP = 7


def forks_of(plan: StepPlan) -> list[int]:
    """Ids of the requests that a plan admits as forks."""
    return [one.request.request_id for one in plan.admissions if one.chunk.source is not None]


def fork(**limits: object) -> tuple[Planned, list[int]]:
    """Three samples of a prompt of six tokens, two blocks, after a step; and the ids of its forks."""
    planned = Planned(**limits)
    for _ in range(3):
        planned.add(range(6), group=GROUP)
    plan = planned.scheduler.schedule()
    planned.commit(plan)
    return planned, forks_of(plan)


@pytest.mark.parametrize(
    ("limits", "forks"),
    [({}, [2, 3]), ({"max_requests": 2}, [2]), ({"total_blocks": 3}, [2]), ({"total_blocks": 2}, [])],
)
def test_as_many_fork_as_there_is_room_for(limits, forks):
    """Each needs a row of the batch, and a block for its copy of the partial one."""
    assert fork(**limits)[1] == forks


@pytest.mark.parametrize("differs", [{"num_tokens_to_generate": 0}, {"cache_salt": "b"}, {"return_log_probs": True}])
def test_a_sample_that_must_not_take_over(differs):
    """One of no tokens would get one; another salt's contents are another tenant's; a scored one has no scores."""
    planned = Planned()
    planned.add(range(6), group=GROUP, cache_salt="a")
    other = planned.add(range(6), group=GROUP, **({"cache_salt": "a"} | differs))
    plan = planned.scheduler.schedule()
    assert forks_of(plan) == []
    planned.commit(plan)
    while not other.is_ended:
        planned.step()
    assert other.generated_count == other.params.num_tokens_to_generate


@pytest.mark.parametrize(("length", "steps", "change"), [(8, 2, "suspend"), (12, 1, "reset_prefix_cache")])
def test_a_prompt_without_a_first_token_or_present_blocks_is_not_taken_over(length, steps, change):
    """EX-4: one that is computed again samples nothing; after a reset its blocks are of the contents before."""
    planned = Planned()
    planned.add(range(length), group=GROUP)
    for _ in range(steps):
        planned.step()
    getattr(planned.scheduler, change)()
    planned.add(range(length), group=GROUP)
    assert forks_of(planned.scheduler.schedule()) == []


def test_samples_wait_for_the_end_of_a_prefill_without_a_slot_for_states():
    """Else each would compute the prompt for itself, beside a chunk that ends at a boundary."""
    planned = Planned(slots=0, aligned_chunks=True, max_tokens=30)
    for _ in range(2):
        planned.add(range(22), group=GROUP)
    assert [planned.step()[0] for _ in range(2)] == [[(1, 0, 20)], [(1, 20, 22), (2, 22, 22)]]
    assert planned.scheduler.counters.skipped_tokens == 22, "it has forked"


def test_blocks_of_a_fork_can_be_found():
    """After a reset, too: a fork belongs to the present contents of the cache."""
    planned = Planned()
    planned.scheduler.reset_prefix_cache()
    planned.add(range(6), group=GROUP, num_tokens_to_generate=1)
    sample = planned.add(range(6), group=GROUP)
    while not sample.is_ended:
        planned.step()
    assert sample.ledger.skipped == 6, "it has forked"
    assert len(planned.scheduler.cache.match(sample.block_hashes)) == 2, "one of the prompt, and its own"


def test_drafts_leave_forks_their_blocks():
    """KV-6, SP-1: a draft gets no block that a sample needs for its copy; forgotten, the last one was taken twice."""
    planned = Planned(slots=None, max_drafts=4, total_blocks=4)
    planned.add(range(3))  # one block; its next token needs no other
    planned.step()
    samples = [planned.add(range(10, 16), group=GROUP) for _ in range(2)]
    planned.scheduler.propose({1: (1, 1)})
    planned.commit(planned.scheduler.schedule())
    assert [one.computed_end for one in samples] == [6, 6], "both are in the batch"


def test_a_fork_uses_the_blocks_that_its_source_uses():
    """KV-3: equal blocks that another request has published first; those that both computed are free again."""
    planned = Planned(slots=0, max_tokens=12)
    planned.add(range(6))
    for _ in range(2):
        planned.add(range(6), group=GROUP)
    plan = planned.scheduler.schedule()
    assert forks_of(plan) == [3]
    planned.commit(plan)
    tables = [one.block_table for one in planned.scheduler.queues.running]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 3
    planned.scheduler.check()


def test_forks_of_a_failed_step_start_again():
    """KV-6: with the request that was to compute their prompt; they own nothing until then."""
    planned = Planned()
    requests = [planned.add(range(6), group=GROUP) for _ in range(3)]
    scheduler, plan = planned.scheduler, planned.scheduler.schedule()
    assert forks_of(plan) == [2, 3]
    scheduler.abandon(plan.chunks, "failed")
    scheduler.check()
    assert list(scheduler.queues.waiting) == requests
    assert not any(one.block_table for one in requests)
