"""CU-6: random calls of an engine that launches steps ahead give what an engine gives that waits, errors included."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from functools import partial

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.engine.async_scheduling import InFlightStep
from megatron_ext.errors import RestoreError
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.waiting_order import Line, WaitingOrder
from tests.on_request import long_except
from tests.unit_tests.support.paper_engine import Paper
from tests.unit_tests.support.simulated_device import (
    WORDS,
    FollowingDevice,
    RefusingDevice,
    SimulatedDevice,
)


class Life:
    """Random calls of an engine, recorded, so that another engine can repeat them."""

    def __init__(self, paper: Paper, source: random.Random, *, is_rough: bool = True) -> None:
        self.paper, self.source, self.is_rough = paper, source, is_rough
        self.script: list[tuple[object, ...]] = []
        self.seen: list[object] = []
        self._stems = [tuple(source.randrange(WORDS) for _ in range(24)) for _ in range(2)]
        self._names = iter(range(10_000))

    def live(self, actions: int) -> None:
        weights = {self._add: 2.5, self._turn: 1, self._step: 14, self._abort: 1}
        weights |= {self._again: 0.6, self._call: 0.5} if self.is_rough else {}
        for action in self.source.choices(list(weights), list(weights.values()), k=actions):
            for call in action():
                self._do(call)
        while self.paper.engine.is_busy:
            self._do(("step", None))

    def _do(self, call: tuple[object, ...]) -> None:
        if call[0] == "step":
            in_flight = self.paper.engine.replicas[0].async_scheduling._in_flight
            before = self.paper.ahead
            computed = self.paper.step()
            discarded = None
            if self.paper.ahead > before:
                discarded = in_flight.step.num_tokens - sum(end - start for _, start, end in computed)
            call = ("step", discarded)
            self.seen.append(what_there_is(self.paper, computed))
        else:
            tell(self.paper, call)
        self.script.append(call)

    def _prompt(self) -> tuple[int, ...]:
        stem = self.source.choice(self._stems)[: self.source.choice([0, 3, 4, 8, 15, 24])]
        return (*stem, *(self.source.randrange(WORDS) for _ in range(self.source.randint(1, 20))))

    def _turn(self) -> Iterator[tuple[object, ...]]:
        """Something that was said before goes on."""
        records = list(self.paper.records.values())
        if records:
            record = self.source.choice(records)
            prompt = (*record.prompt_tokens, *record.generated_tokens, self.source.randrange(WORDS))[:120]
            yield "add", next(self._names), prompt, (("num_tokens_to_generate", 20),)

    def _add(self) -> Iterator[tuple[object, ...]]:
        choose = self.source.choice
        params = {
            "num_tokens_to_generate": choose([0, 1, 2, 9, 30, 60]),
            "min_tokens": choose([0, 0, 5]),
            "stop_words": choose([(), (), (f"<{self.source.randrange(WORDS)}>",)]),
            "temperature": choose([0.0, 0.9]),
            "seed": self.source.randrange(1_000),
            "enable_prefix_caching": choose([True, True, True, False]),
        }
        params["min_tokens"] = min(params["min_tokens"], params["num_tokens_to_generate"])
        yield "add", next(self._names), self._prompt(), tuple(params.items())

    def _step(self) -> Iterator[tuple[object, ...]]:
        yield "step", None

    def _abort(self) -> Iterator[tuple[object, ...]]:
        living = [request.request_id for request in self.paper.scheduler.queues]
        if living:
            yield "abort", self.source.choice(living)

    def _again(self) -> Iterator[tuple[object, ...]]:
        """An id that is free is used again at once, while the step before may have a row of it."""
        for call in self._abort():
            yield call
            yield "step", None
            yield "again", call[1], self._prompt()

    def _call(self) -> Iterator[tuple[object, ...]]:
        yield (self.source.choice(["reset", "weights", "suspend"]),)


def tell(paper: Paper, call: tuple[object, ...]) -> None:
    """Do what a script says."""
    if call[0] == "add":
        paper.add(call[1], call[2], **dict(call[3]))
    elif call[0] == "again":
        paper.records.pop(call[1], None)
        paper.add(call[1], call[2], num_tokens_to_generate=12, seed=1, ignore_eos=True)
    elif call[0] == "abort":
        paper.engine.output.abort(paper.engine.output.get(call[1]))
    elif call[0] == "suspend":
        paper.suspend()
    else:
        {"reset": paper.engine.reset_prefix_cache, "weights": paper.engine.weights_changed}[call[0]]()
    paper.engine.check()


def what_there_is(paper: Paper, computed: object) -> object:
    """State after a step: result, counters, queues and use of the pools, except blocks, used a step earlier."""
    counters = dataclasses.replace(paper.scheduler.counters, launched_ahead=0)
    queues = [[one.request_id for one in queue] for queue in (paper.scheduler.queues.running, paper.scheduler.queues)]
    return computed, counters, dataclasses.replace(paper.scheduler.cache.use(), blocks_in_use=0), queues


def schedule_running(scheduler: Scheduler, discarded: int) -> StepPlan:
    """Plan a step that admits none, without the tokens of discarded rows."""
    limits, waiting = scheduler.limits, scheduler.queues.waiting
    scheduler.limits = dataclasses.replace(limits, max_tokens=limits.max_tokens - discarded)
    waiting.line = lambda: Line(WaitingOrder())
    try:
        return Scheduler.schedule(scheduler)
    finally:
        scheduler.limits = limits
        del waiting.line


def replayed(script: list[tuple[object, ...]], paper: Paper) -> list[object]:
    """Replay a script on an engine without launches ahead.

    In steps that were launched ahead before, it looks at no waiting request, and discarded rows have their tokens.
    """
    seen = []
    for call in script:
        if call[0] == "step":
            if call[1] is not None:
                paper.scheduler.schedule = partial(schedule_running, paper.scheduler, call[1])
            seen.append(what_there_is(paper, paper.step()))
            vars(paper.scheduler).pop("schedule", None)
        else:
            tell(paper, call)
    return seen


def outcome(record: RequestRecord) -> object:
    """A record without its times."""
    events = tuple((event.type, event.payload) for event in record.events)
    explanation = record.prefix_cache_explanation and dataclasses.replace(record.prefix_cache_explanation, age=None)
    timeless = dataclasses.replace(record, events=events, arrival_wall_time=0.0, latency=0.0, ttft=None)
    return dataclasses.replace(timeless, prefix_cache_explanation=explanation)


LIVES = [
    {},
    {"slots": None},
    {"slots": 3, "total_blocks": 40, "overtake_tokens": 100},
    {"slots": None, "total_blocks": 14, "paused_blocks": 4},
    {"max_requests": 2, "total_blocks": 30, "slots": 1, "overtake_tokens": 10**6},
    {"async_states": 0},
    {"async_states": 1, "slots": 6},
    {"policy": EvictionPolicyName.REF_ZERO, "total_blocks": 30, "explains": True},
    {"total_blocks": 36, "slots": 5, "explains": True, "overtake_tokens": 100},
    {"policy": None, "total_blocks": 24, "paused_blocks": 6},
    {"slots": 4, "aligned_chunks": True, "max_requests": 6, "max_tokens": 16},
    {"slots": 7, "max_tokens": 10, "async_states": 4, "max_prefills": 1},
]


@pytest.mark.parametrize("number", long_except(range(0, len(LIVES), 2), range(len(LIVES))))
@pytest.mark.parametrize("seed", long_except([0], range(3)))
def test_lives_are_those_of_an_engine_that_waits(number, seed):
    """CU-6: equal steps, counts, blocks, snapshots, records and tokens, except that a new request waits a step longer.

    When blocks are short, both evict them a step earlier.
    """
    settings = LIVES[number]
    life = Life(Paper(**settings), random.Random(f"{seed} {number}"))
    life.live(120)
    paper = life.paper
    paper.check_tokens()
    assert paper.ahead > 5, "hardly any step was launched ahead"
    plain = Paper(RefusingDevice if "total_blocks" in settings else SimulatedDevice, **settings)
    for i, (own, others) in enumerate(zip(life.seen, replayed(life.script, plain), strict=True)):
        assert own == others, f"step {i}"
    assert plain.ahead == 0
    assert {name: outcome(one) for name, one in paper.records.items()} == {
        name: outcome(one) for name, one in plain.records.items()
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_failed_step_abandons_the_next_one_too(seed):
    """CU-6: an error in a launch, a launch ahead or a result loses no request and leaves none waiting forever."""
    source = random.Random(f"fails {seed}")
    paper = Paper(total_blocks=60, slots=4)
    failed = added = 0
    for _ in range(150):
        if source.random() < 0.25:
            prompt = tuple(source.randrange(WORDS) for _ in range(source.choice([1, 7, 20, 60])))
            paper.add(added, prompt, num_tokens_to_generate=source.randint(1, 30), ignore_eos=source.random() < 0.5)
            added += 1
        if source.random() < 0.15:
            paper.device.breaks_at = paper.device.calls + source.randint(1, 4)
        try:
            paper.step()
        except RuntimeError:
            failed += 1
            paper.engine.check()
            if source.random() < 0.5:
                paper.suspend()  # sees that nothing is computed by then
            assert not len(paper.scheduler.queues.running) or paper.engine.is_busy
    paper.device.breaks_at = None
    paper.run()
    paper.check_tokens()
    assert failed > 5
    assert paper.ahead > 10
    assert len(paper.records) == added
    assert all(record.status is Status.COMPLETED for record in paper.records.values())


MISTAKES = ["void rows count", "blocks of the next step are others'", "tokens of other rows", "states without names"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_seen(monkeypatch, mistake):
    """The negative controls: each shows in a life."""
    if mistake == "void rows count":
        monkeypatch.setattr(InFlightStep, "living", lambda in_flight: in_flight)
    elif mistake == "states without names":
        monkeypatch.setattr(FollowingDevice, "name_states", lambda device, states: None)
    else:
        compute = FollowingDevice._compute

        def swapped(device, step, answer):
            names = list(device._last)
            device._last = dict(zip(names, list(device._last.values())[::-1], strict=True))
            compute(device, step, answer)

        monkeypatch.setattr(FollowingDevice, "_compute", swapped)

    def live() -> None:
        for seed in range(5):
            life = Life(Paper(), random.Random(seed))
            if mistake == "blocks of the next step are others'":
                life.paper.scheduler.async_planner._grow = lambda chunks: None
            life.live(150)
            life.paper.check_tokens()

    with pytest.raises((AssertionError, KeyError, IndexError, RestoreError)):
        live()
