"""CU-6: what is planned before the tokens of a step are known is what would be planned after it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.scheduling.audit import AuditTarget
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import LAST_SAMPLED, ScheduledChunk, describe_step
from tests.on_request import long_except
from tests.unit_tests.scheduling.builders import make_limits

BLOCK, TOKENS = 4, 8  # of a block; of a step


class Planned:
    """A scheduler whose steps are committed by hand.

    Args:
        slots: Snapshot slots; None: the model has no states.
        limits: Limits beside those of the tests.
    """

    def __init__(self, slots: int | None = 20, **limits: object) -> None:
        own = {"block_size": BLOCK, "max_tokens": TOKENS, "total_blocks": 60, "max_sequence_length": 200}
        self.scheduler = Scheduler(
            make_limits(**(own | {"async_states": 4} | limits)), EvictionPolicyName.LRU, b"ahead", slots
        )
        self.count = 0

    def add(
        self, prompt: range | list[int], *, group: int | None = None, audit: AuditTarget | None = None, **params: object
    ) -> Request:
        params = {"num_tokens_to_generate": 6, "ignore_eos": True} | params
        made = RequestParams(**params)
        self.count += 1
        inputs = RequestInputs(tuple(prompt), made)
        request = Request(self.count, inputs, self.count, seed=self.count, group=group, audit=audit)
        self.scheduler.add(request)
        return request

    def commit(self, plan: StepPlan) -> None:
        """Commit the step; each token is the number of its request."""
        step = self.scheduler.describe(plan)
        self.scheduler.commit(step, {one.request_id: one.request_id for one in step.yielding})
        self.scheduler.check()

    def plan_next(self, plan: StepPlan) -> tuple[Chunk, ...]:
        """Chunks planned after `plan`; the requests are as they were before."""
        before = [state_of(one) for one in self.scheduler.queues]
        found = self.scheduler.async_planner.plan_next(plan.chunks)
        assert [state_of(one) for one in self.scheduler.queues] == before
        return () if found is None else found.chunks

    def ahead(self, plan: StepPlan) -> tuple[Chunk, ...]:
        """Chunks planned after `plan`; the step is not launched."""
        chunks = self.plan_next(plan)
        self.scheduler.async_planner.check()
        self.scheduler.async_planner.forgo()
        return chunks

    def step(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """Run a step; return its chunks, and those planned after it."""
        plan = self.scheduler.schedule()
        ahead = self.ahead(plan)
        self.commit(plan)
        return spans(plan.chunks), spans(ahead)


def state_of(request: Request) -> object:
    """Tokens of a request, how far they are computed, and their block hashes."""
    return request.tokens[:], request.computed_end, list(request.block_hashes)


def spans(chunks: Iterable[Chunk]) -> list[tuple[int, int, int]]:
    return [(one.request.request_id, one.start, one.end) for one in chunks]


def test_waiting_requests_are_ranked_before_a_step_that_was_launched_ahead():
    """SC-5: entries that a new request matches are spared from then on, as in a step that was not."""
    planned = Planned(max_requests=1, overtake_tokens=1000)
    planned.add(range(5), num_tokens_to_generate=9)
    planned.commit(planned.scheduler.schedule())
    plan = planned.scheduler.schedule()
    assert planned.plan_next(plan)
    waiting = planned.add(range(9))
    planned.commit(plan)
    planned.scheduler.async_planner.adopt()
    assert planned.scheduler.cache._spared == [waiting.block_hashes]


@pytest.mark.parametrize(
    "asked", [{"return_log_probs": True}, {"audit": AuditTarget(1, 16)}], ids=["prompt log-probs", "audit"]
)
def test_prefills_whose_results_are_read_at_once_are_not_certain(asked):
    """CU-6: prompt log-probs and audits; log-probs of generated tokens alone are."""
    planned = Planned()
    planned.add(range(30), **asked)
    assert planned.step()[1] == []
    planned = Planned()
    planned.add(range(30), return_log_probs=True, skip_prompt_log_probs=True)
    assert planned.step()[1] == [(1, 8, 16)]


@pytest.mark.parametrize(("prompt", "ahead"), [(range(70, 90), [(1, 8, 16)]), ([*range(18), 99], [])])
def test_a_new_request_that_will_follow_is_waited_for(prompt, ahead):
    """CU-6, KV-6: it must register while its leader can take a snapshot; one that lacks tokens delays no step."""
    planned = Planned()
    planned.add(range(40))
    plan = planned.scheduler.schedule()
    planned.add(prompt)
    assert spans(planned.ahead(plan)) == ahead


def test_room_for_another_prefill_is_waited_for():
    """CU-6: the last chunk of a prompt leaves tokens to the next prompt."""
    planned = Planned()
    planned.add(range(20))
    planned.add(range(70, 90))
    assert [planned.step() for _ in range(3)] == [
        ([(1, 0, 8)], [(1, 8, 16)]),
        ([(1, 8, 16)], []),
        ([(1, 16, 20), (2, 0, 4)], [(1, 20, 21), (2, 4, 11)]),
    ]


def test_a_paused_request_is_waited_for():
    """CU-6: steps planned ahead resume nothing, so it would starve; what it waits for is a block."""
    planned = Planned(total_blocks=5)
    for start in (0, 50):
        planned.add(range(start, start + 7), num_tokens_to_generate=8)
    found = []
    while len(planned.scheduler.queues):
        _, ahead = planned.step()
        found.append((len(planned.scheduler.queues.paused), ahead))
    assert any(paused for paused, _ in found)
    assert any(ahead for _, ahead in found)
    assert not any(paused and ahead for paused, ahead in found)


def test_loads_from_disk_are_waited_for_once_they_are_due():
    """CU-6, EX-11: the request that waits for one cannot enter before; a plan places or ends it."""
    planned = Planned(slots=None)
    planned.add(range(3))
    waiting = planned.add(range(50, 60))
    planned.scheduler.disk_loads.begin(1, waiting, 2, has_snapshot=False)
    assert planned.step() == ([(1, 0, 3)], [(1, 3, 4)])
    planned.scheduler.disk_loads.is_due = True
    assert planned.step() == ([(1, 3, 4)], [])


def test_a_request_of_before_a_reset_leaves_no_states():
    """CU-6, EX-4: its step needs no slot, and is planned ahead without one."""
    planned = Planned(async_states=0)
    planned.add(range(6))
    assert [planned.step()[1] for _ in range(2)] == [[(1, 6, 7)], []]
    planned = Planned(async_states=0)
    planned.add(range(6))
    planned.step()
    planned.scheduler.reset_prefix_cache()
    assert planned.step()[1] == [(1, 7, 8)]


@pytest.mark.parametrize("slots", [None, 20])
def test_followers_that_wake_are_waited_for(slots):
    """CU-6, KV-6: the step that computes their prefix is followed by a plan, earlier ones are not."""
    planned = Planned(slots)
    planned.add(range(40))
    planned.add([*range(18), 99])
    assert [planned.step()[1] for _ in range(2)] == [[(1, 8, 16)], []]
    assert planned.step()[0] == [(1, 16, 24)] or slots is None


def test_samples_that_may_fork_are_waited_for():
    """CU-6: the last chunk of a prompt that others of its group take over is planned."""
    planned = Planned()
    for _ in range(2):
        planned.add(range(22), group=7)
    found = [planned.step() for _ in range(3)]
    assert [ahead for _, ahead in found[:2]] == [[(1, 8, 16)], []]
    assert planned.scheduler.counters.skipped_tokens == 22, "it has forked"


@pytest.mark.parametrize(("is_aborted", "kept"), [(False, [4, 12]), (True, [12])])
def test_a_step_ahead_keeps_the_states_that_its_plan_would_keep(is_aborted, kept):
    """CU-6: of a decode, unless its request has ended meanwhile, and of a prefill that passes a checkpoint."""
    planned = Planned()
    decode = planned.add(range(90, 93))
    planned.add(range(40), cache_checkpoint=(12,))
    scheduler, plan = planned.scheduler, planned.scheduler.schedule()
    assert spans(planned.plan_next(plan)) == [(1, 3, 4), (2, 5, 12)]
    planned.commit(plan)
    if is_aborted:
        scheduler.end(decode, Outcome(Status.ABORTED))
    assert [one.position for one in scheduler.async_planner.adopt()] == kept
    scheduler.check()


def test_a_request_that_matches_more_than_before_is_waited_for():
    """CU-6: no block became free, but those that it lacked are published by the step before the one ahead."""
    planned = Planned(slots=0, total_blocks=7, max_tokens=16)
    planned.add(range(16), num_tokens_to_generate=12)
    planned.add([*range(16), 30])
    plan = planned.scheduler.schedule()
    ahead = planned.plan_next(plan)
    assert spans(ahead) == [(1, 16, 17)], "it lacks blocks"
    planned.commit(plan)
    planned.scheduler.async_planner.adopt()
    assert planned.ahead(dataclasses.replace(plan, chunks=ahead)) == ()


def test_a_prefill_of_generated_tokens_ends_with_a_known_one():
    """CU-6: after a preemption the last generated token is known; the step before does not sample it."""
    planned = Planned()
    request = planned.add(range(6), num_tokens_to_generate=20)
    for _ in range(5):
        planned.step()
    planned.scheduler.suspend()
    count = len(request.tokens)
    plan = planned.scheduler.schedule()
    assert spans(plan.chunks) == [(1, 0, 8)]
    chunks = planned.plan_next(plan)
    states = planned.scheduler.async_planner.states
    (found,) = describe_step(chunks, BLOCK, ahead=states).chunks
    assert (found.start, found.end) == (8, count)
    assert found.token_ids == tuple(request.tokens[8:count])
    assert found.sampling is not None


SETTINGS = [
    {},
    {"slots": None},
    {"slots": 3},
    {"slots": 0},
    {"total_blocks": 24, "max_requests": 3},
    {"aligned_chunks": True},
    {"max_prefills": 1},
    {"enough_prefill_tokens": 3},
    {"max_tokens": 5},
    {"prefill_tokens_beside_decodes": 3},
    {"decode_share": 0.5, "prefill_tokens_beside_decodes": 6},
]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
@pytest.mark.parametrize("seed", long_except([0], range(4)))
def test_plans_ahead_are_the_plans_after(seed, number):
    """CU-6: chunks and messages, but for the token that is not known and for the slots of snapshots."""
    source = random.Random(f"{seed} {number}")
    planned = Planned(**SETTINGS[number])
    scheduler, stems = planned.scheduler, [[source.randrange(90) for _ in range(20)] for _ in range(2)]
    prefills, decodes, is_short = 0, 0, "total_blocks" in SETTINGS[number]
    expected: tuple[ScheduledChunk, ...] | None = None
    for _ in range(150):
        plan = scheduler.schedule()
        if expected is not None:
            admitted = {one.request.request_id for one in plan.admissions}
            assert not admitted or is_short, "blocks that an ended request gave back"
            found = [one for one in scheduler.describe(plan).chunks if one.request_id not in admitted]
            assert [known(one) for one in found] == [known(one) for one in expected]
            for own, other in zip(found, expected, strict=True):
                assert {one.position for one in own.snapshots} <= {one.position for one in other.snapshots}
        expected = None
        if not plan.chunks:
            planned.add([*source.choice(stems)[: source.randrange(20)], *range(source.randrange(1, 30))], seed=seed)
            continue
        scheduler.hold_prefills(are_held=scheduler.limits.decode_share > 0 and source.random() < 0.3)
        chunks = planned.plan_next(plan)
        if chunks:
            expected = describe_step(chunks, BLOCK, ahead=scheduler.async_planner.states).chunks
            prefills += any(not one.is_decode for one in expected)
            decodes += any(one.token_ids == (LAST_SAMPLED,) for one in expected)
        scheduler.async_planner.forgo()
        planned.commit(plan)
        if expected is None and source.random() < 0.5:
            for _ in range(source.randint(1, 3)):
                stem = source.choice(stems)[: source.choice([0, 8, 12, 20])]
                prompt = [*stem, *(source.randrange(90) for _ in range(source.randint(1, 25)))]
                planned.add(prompt, num_tokens_to_generate=source.randint(1, 8), temperature=source.choice([0, 0.8]))
    assert prefills > 5
    assert decodes > 5


def known(chunk: ScheduledChunk) -> ScheduledChunk:
    """A chunk without what differs in a step planned ahead: a token, slots, and blocks that others have published."""
    tokens, blocks = () if chunk.is_decode else chunk.token_ids, chunk.block_ids[-1:]
    return dataclasses.replace(chunk, token_ids=tokens, snapshots=(), block_ids=blocks)
