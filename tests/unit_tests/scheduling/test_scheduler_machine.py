"""Random requests, against a model of resource ownership that is written independently of the scheduler.

The model follows the plan's moves and keeps, for each request, how many blocks and running state slots it may own and
which positions have been computed. It knows none of the planner's reasons, only what no plan may do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from megatron_ext.scheduling import planner, scheduler
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SchedulerLimits, StepPlan
from megatron_ext.scheduling.planner import check_admissible
from megatron_ext.scheduling.queue import RequestQueue
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import describe_step
from tests.unit_tests.scheduling.builders import frozen, make_request

MAX_LENGTH = 32


@dataclass
class Owner:
    """Knowledge of the model about one request."""

    prompt: int
    to_generate: int
    place: str = "waiting"
    blocks: int = 0
    tokens: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)  # positions computed since the last admission, in order
    ever: set[int] = field(default_factory=set)  # positions computed at any time
    first_time: int = 0
    again: int = 0
    steps: int = 0
    tokens_at_admission: int = 0
    events: list[EventType] = field(default_factory=lambda: [EventType.ADD_ENGINE])

    def lose_all(self) -> None:
        self.blocks, self.done, self.place = 0, [], "waiting"

    @property
    def only_last_is_left(self) -> bool:
        return len(self.tokens) > self.prompt and len(self.done) == len(self.tokens) - 1


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, fails, aborts and suspends at random; `check` and `compare` after each."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[Request, Owner] = {}
        self.arrivals = 0

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        max_requests = data.draw(st.sampled_from([4, 3, 2, 1]), "max_requests")
        self.limits = SchedulerLimits(
            block_size=data.draw(st.sampled_from([2, 1, 3, 4]), "block_size"),
            total_blocks=data.draw(st.integers(1, 14), "total_blocks"),
            paused_blocks=data.draw(st.sampled_from([None, 0, 2, 4]), "paused_blocks"),
            max_requests=max_requests,
            max_tokens=max_requests + data.draw(st.integers(0, 8), "spare tokens"),
            max_sequence_length=MAX_LENGTH,
            chunked_prefill=data.draw(st.booleans(), "chunked_prefill"),
        )
        self.scheduler = Scheduler(self.limits)
        self.preemptions = self.pauses = 0

    # What may happen

    @rule(sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 16)), min_size=1, max_size=4))
    def arrive(self, sizes: list[tuple[int, int]]) -> None:
        for prompt, to_generate in sizes:
            self.add(prompt, to_generate)

    def add(self, prompt: int, to_generate: int) -> None:
        request = make_request(self.arrivals, prompt, num_tokens_to_generate=to_generate)
        fits = math.ceil(prompt / self.limits.block_size) <= self.limits.total_blocks
        in_one_step = self.limits.chunked_prefill or prompt <= self.limits.max_tokens
        assert (check_admissible(request, self.limits) is None) == (fits and in_one_step)
        if not (fits and in_one_step):
            return
        self.arrivals += 1
        self.scheduler.add(request)
        self.owners[request] = Owner(prompt, to_generate, tokens=list(request.tokens))
        self.verify()

    @rule(count=st.integers(1, 6), data=st.data())
    def steps(self, count: int, data: st.DataObject) -> None:
        for _ in range(count):
            self.run_step(lambda: data.draw(st.integers(0, 19), "ends early") == 1)

    @rule()
    def fail(self) -> None:
        plan = self.schedule()
        self.scheduler.abandon(plan.chunks, "RuntimeError: planted")
        for chunk in plan.chunks:
            owner = self.owners[chunk.request]
            owner.lose_all()
            owner.events.append(EventType.ERROR_TRANSIENT)
        self.verify()

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """EX-8: abort at any moment; all resources of the request are free at once."""
        request = data.draw(st.sampled_from(self.alive()), "aborted")
        self.end(request, Status.ABORTED)
        self.verify()

    @rule()
    def suspend(self) -> None:
        self.scheduler.suspend()
        for request in self.alive():
            self.owners[request].lose_all()
        self.verify()

    def teardown(self) -> None:
        """Check that without arrivals every request ends, within a bound on the steps."""
        if hasattr(self, "limits"):
            self.drain()

    def drain(self) -> None:
        # Each token may be paid for by computing all before it again, one a step at worst.
        tokens_left = sum(self.owners[request].to_generate + 1 for request in self.alive())
        for _ in range(tokens_left * (MAX_LENGTH + 1)):
            if not self.alive():
                break
            self.run_step(lambda: False)
        assert not self.alive(), "requests never end"
        assert self.scheduler.blocks.free_count == self.limits.total_blocks
        assert self.scheduler.running_slots.free_count == self.limits.max_requests

    # One step

    def run_step(self, ends_early: Callable[[], bool]) -> None:
        plan = self.schedule()
        due = [chunk.request for chunk in plan.chunks if chunk.end == len(self.owners[chunk.request].tokens)]
        tokens = {request.request_id: 10_000 + len(request.tokens) for request in due}
        ended = self.scheduler.commit(describe_step(plan.chunks, self.limits.block_size), tokens)
        assert ended == [r for r in due if self.owners[r].to_generate == r.generated_count]
        for chunk in plan.chunks:
            owner = self.owners[chunk.request]
            for position in range(chunk.start, chunk.end):
                owner.again += position in owner.ever
                owner.first_time += position not in owner.ever and position < owner.prompt
            owner.done += range(chunk.start, chunk.end)
            owner.ever.update(owner.done)
            owner.steps += 1
        for request in due:
            assert len(self.owners[request].done) == len(self.owners[request].tokens)
            self.generate(request, ends_early)
        self.verify()

    def generate(self, request: Request, ends_early: Callable[[], bool]) -> None:
        owner = self.owners[request]
        token = 10_000 + len(owner.tokens)
        if len(owner.tokens) == owner.prompt:
            owner.events.append(EventType.FIRST_TOKEN)
        owner.tokens.append(token)
        assert request.computed_prefill_tokens == owner.prompt, "a token came, but not all of the prompt was computed"
        if len(owner.tokens) == owner.prompt + owner.to_generate:
            self.note_end(request, Status.COMPLETED)
        elif ends_early():
            self.end(request, Status.COMPLETED)

    def end(self, request: Request, status: Status) -> None:
        self.scheduler.end(request, status)
        self.note_end(request, status)

    def note_end(self, request: Request, status: Status) -> None:
        owner = self.owners[request]
        owner.lose_all()
        owner.place = "ended"
        owner.events += [EventType.FINISH] if status is Status.COMPLETED else []

    def schedule(self) -> StepPlan:
        """Plan and apply; the model follows and objects."""
        before = {request: owner.place for request, owner in self.owners.items()}
        untouched = frozen(self.scheduler.queues)
        expected = planner.plan_step(
            self.scheduler.queues, self.limits, self.scheduler.cache, self.scheduler.pending_blocks
        )
        assert frozen(self.scheduler.queues) == untouched, "planning changed something"
        plan = self.scheduler.schedule()
        assert without_errors(plan) == without_errors(expected), "the plan that was applied is another one"
        self.follow_moves(plan, before)
        self.follow_admissions(plan, before)
        self.follow_chunks(plan.chunks, {admission.request for admission in plan.admissions}, plan.preemptions)
        self.judge(plan)
        return plan

    def follow_moves(self, plan: StepPlan, before: dict[Request, str]) -> None:
        for request, error in plan.failures:
            owner = self.owners[request]
            assert before[request] != "ended"
            assert math.ceil(len(owner.tokens) / self.limits.block_size) == error.needed > self.limits.total_blocks
            assert str(error) in request.outcome.error
            owner.lose_all()
            owner.place = "ended"
            owner.events += [EventType.ERROR_NONTRANSIENT, EventType.FAIL]
        for request in plan.preemptions:
            owner = self.owners[request]
            assert before[request] in ("running", "paused")
            assert len(owner.tokens) > owner.tokens_at_admission, "preempted before it got a token: that may never end"
            owner.lose_all()
            owner.events.append(EventType.EVICT)
        for request in plan.pauses:
            assert before[request] == "running"
            assert self.owners[request].only_last_is_left, "a request was paused within its prefill"
            self.owners[request].place = "paused"
            self.owners[request].events.append(EventType.PAUSE)
        for request in plan.resumes:
            assert before[request] == "paused"
            self.owners[request].place = "running"
        moved = [*plan.preemptions, *plan.pauses, *plan.resumes, *(request for request, _ in plan.failures)]
        assert len(set(moved)) == len(moved), "somebody is moved twice"
        still_paused = self.placed("paused")
        assert all(one.arrival > paused.arrival for one in plan.preemptions for paused in still_paused)
        self.preemptions += len(plan.preemptions)
        self.pauses += len(plan.pauses)

    def follow_admissions(self, plan: StepPlan, before: dict[Request, str]) -> None:
        gone = {request for request, _ in plan.failures}
        line = sorted((r for r, place in before.items() if place == "waiting" and r not in gone), key=by_arrival)
        admitted = [admission.request for admission in plan.admissions]
        assert admitted == line[: len(admitted)], "somebody was overtaken"
        left = line[len(admitted) :]
        paused = [request for request, owner in self.owners.items() if owner.place == "paused"]
        if paused or plan.preemptions:
            assert not admitted, "admitted before those who were here first"
        elif left:
            assert plan.deferral is not None
            assert plan.deferral.request is left[0]
            assert plan.deferral.needed > plan.deferral.available
        for admission in plan.admissions:
            owner = self.owners[admission.request]
            owner.place = "running"
            owner.blocks = math.ceil(len(owner.tokens) / self.limits.block_size)
            owner.tokens_at_admission = len(owner.tokens)
            owner.events.append(EventType.ADD_CONTEXT)

    def follow_chunks(
        self, chunks: tuple[Chunk, ...], admitted: set[Request], preemptions: tuple[Request, ...]
    ) -> None:
        assert len({chunk.request for chunk in chunks}) == len(chunks), "two chunks for a request"
        assert sum(chunk.end - chunk.start for chunk in chunks) <= self.limits.max_tokens
        kinds = [chunk.is_decode for chunk in chunks]
        assert kinds == sorted(kinds, reverse=True), "a decode after a prefill"
        for chunk in chunks:
            owner = self.owners[chunk.request]
            assert owner.place == "running", f"a chunk of a {owner.place} request"
            assert chunk.start == chunk.request.computed_end == len(owner.done)
            assert chunk.start < chunk.end <= len(owner.tokens)
            assert chunk.is_decode == (chunk.end - chunk.start == 1 and chunk.start >= owner.prompt)
            assert chunk.yields_token == (chunk.end == len(owner.tokens))
            needed = math.ceil(chunk.end / self.limits.block_size)
            if needed > owner.blocks:
                assert owner.only_last_is_left, "a prefill that has begun wants another block"
                assert chunk.request not in admitted
                assert all(one.arrival > chunk.request.arrival for one in preemptions), "an older one was preempted"
                owner.blocks = needed

    def judge(self, plan: StepPlan) -> None:
        """Check the rules that every plan must satisfy."""
        chunk_of = {chunk.request: chunk for chunk in plan.chunks}
        assert chunk_of or not self.alive(), "requests are alive, and nothing is computed"
        prefilling_is_short = False
        for request in sorted(self.alive(), key=by_arrival):
            owner = self.owners[request]
            if owner.place == "running" and owner.only_last_is_left:
                assert request in chunk_of, "a request that could decode does not"
            elif owner.place == "running" and owner.tokens_at_admission and owner.done:
                assert not (prefilling_is_short and request in chunk_of), "a younger prefill got an older one's tokens"
                end = chunk_of[request].end if request in chunk_of else len(owner.done)
                prefilling_is_short |= end < len(owner.tokens)
        paused = [request for request in self.alive() if self.owners[request].place == "paused"]
        kept = sum(self.owners[request].blocks for request in paused)
        assert self.limits.paused_blocks is None or kept <= self.limits.paused_blocks
        if paused:
            assert self.scheduler.blocks.free_count == 0, "a request is paused beside free blocks"

    # The same, seen from the model and from the scheduler

    def alive(self) -> list[Request]:
        return [request for request, owner in self.owners.items() if owner.place != "ended"]

    def verify(self) -> None:
        self.scheduler.check()
        queues = self.scheduler.queues
        assert list(queues.waiting) == self.placed("waiting")
        assert list(queues.running) == self.placed("running")
        assert list(queues.paused) == self.placed("paused")
        tables = [block for request in self.owners for block in request.block_table]
        assert len(set(tables)) == len(tables), "a block has two owners"
        slots = [request.sequence.running_slot for request in self.owners if request.sequence.running_slot is not None]
        assert len(set(slots)) == len(slots), "a live slot has two owners"
        assert self.scheduler.blocks.free_count == self.limits.total_blocks - len(tables)
        assert (self.scheduler.counters.preemptions, self.scheduler.counters.pauses) == (self.preemptions, self.pauses)
        for request, owner in self.owners.items():
            self.verify_request(request, owner)

    def placed(self, place: str) -> list[Request]:
        return sorted((request for request, owner in self.owners.items() if owner.place == place), key=by_arrival)

    @staticmethod
    def verify_request(request: Request, owner: Owner) -> None:
        assert request.tokens == owner.tokens
        assert len(request.block_table) == owner.blocks
        assert (request.sequence.running_slot is not None) == (owner.place in ("running", "paused"))
        assert request.is_ended == (owner.place == "ended")
        assert owner.done == list(range(request.computed_end)), "positions were left out, repeated or swapped"
        assert request.computed_prefill_tokens == owner.first_time
        assert request.sequence.ledger.recomputed == owner.again
        assert request.timeline.step_count == owner.steps
        assert [event.type for event in request.timeline.events] == owner.events


def by_arrival(request: Request) -> int:
    return request.arrival


def without_errors(plan: StepPlan) -> dict:
    """Copy of everything but the errors, which have no equality."""
    return vars(plan) | {"failures": [request for request, _ in plan.failures]}


COMMON = {
    "deadline": None,
    "stateful_step_count": 20,
    "suppress_health_check": [HealthCheck.too_slow],
    "database": None,
}
SchedulerMachine.TestCase.settings = settings(
    max_examples=40, phases=[Phase.generate, Phase.shrink], print_blob=True, **COMMON
)
TestScheduler = SchedulerMachine.TestCase


# Negative controls: a scheduler with one mistake, and the machine must object.


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


def serves_the_youngest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestQueue, "__iter__", lambda self: iter(tuple(reversed(self._requests))))


def preempts_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    share = planner._share_blocks

    def reversed_paused(*args: object) -> tuple:
        decoding, paused, left = share(*args)
        return decoding, paused[::-1], left

    monkeypatch.setattr(planner, "_share_blocks", reversed_paused)


def gives_prefill_one_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    continuations = planner._plan_continuations
    monkeypatch.setattr(
        planner, "_plan_continuations", lambda prefilling, limits, tokens: continuations(prefilling, limits, tokens + 1)
    )


def keeps_blocks_when_preempting(monkeypatch: pytest.MonkeyPatch) -> None:
    def requeue(self: Scheduler, request: Request, event: EventType | None = None, payload: str | None = None) -> None:
        request.sequence.block_table, request.sequence.computed_end = (), 0  # forgets to release
        self.running_slots.give_back(request.sequence.running_slot)
        request.sequence.running_slot = None
        self.queues.move(request, self.queues.waiting)
        if event is not None:
            request.timeline.note(event, payload)

    monkeypatch.setattr(Scheduler, "_requeue", requeue)


def counts_what_is_computed_again_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Request.advance

    def forgetful(self: Request, end: int) -> int:
        self.sequence.ledger.known_end = self.computed_end
        return advance(self, end)

    monkeypatch.setattr(Request, "advance", forgetful)


def commits_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def abandon(self: Scheduler, chunks: Sequence[Chunk], reason: str) -> None:
        self._advance([chunk.request for chunk in chunks], [chunk.end for chunk in chunks])

    monkeypatch.setattr(Scheduler, "abandon", abandon)


def lets_an_outgrown_request_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_check_fits_pool", lambda request, limits: None)


def puts_prefills_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_step = planner.plan_step

    def reverse(*args: object) -> StepPlan:
        plan = plan_step(*args)
        return StepPlan(**(vars(plan) | {"chunks": plan.chunks[::-1]}))

    monkeypatch.setattr(planner, "plan_step", reverse)
    monkeypatch.setattr(scheduler, "plan_step", reverse)


@pytest.mark.parametrize(
    "plant",
    [
        admits_in_a_step_that_preempts,
        serves_the_youngest_first,
        preempts_the_oldest,
        gives_prefill_one_token_too_many,
        keeps_blocks_when_preempting,
        counts_what_is_computed_again_as_new,
        commits_a_failed_step,
        lets_an_outgrown_request_wait,
        puts_prefills_first,
    ],
)
def test_the_machine_finds_a_planted_mistake(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    quick = settings(max_examples=400, phases=[Phase.generate], derandomize=True, **COMMON)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(SchedulerMachine, settings=quick)
