"""CU-6: a step is launched before the previous step's tokens are known, and no result differs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.executor import Computed
from megatron_ext.engine.in_flight_step import InFlightStep
from megatron_ext.engine.input_processor import InputSettings
from megatron_ext.engine.result import Score, StepResult
from megatron_ext.errors import RestoreError
from megatron_ext.scheduling.async_planning import plan_of
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import ScheduledStep
from megatron_ext.text.vocabulary import Vocabulary
from tests.priority import TestPriority
from tests.unit_tests.support.simulated_device import (
    NOTHING,
    WORDS,
    FollowingDevice,
    RefusingDevice,
    SimulatedDevice,
    next_token,
    state_after,
)
from tests.unit_tests.support.simulated_engine import LIMITS
from tests.unit_tests.support.tokenizers import PieceTokenizer

pytestmark = pytest.mark.priority(TestPriority.HIGH)

BLOCK, END = 4, 7
SETTINGS = {"block_size": BLOCK, "total_blocks": 200, "max_requests": 4, "max_tokens": 24, "max_sequence_length": 200}
SETTINGS |= {"enough_prefill_tokens": None, "async_states": 2}


class Paper:
    """An engine over a device on paper.

    Args:
        device: Class of the device.
        slots: For snapshots; None: the model has no states.
        policy: Eviction policy; None caches nothing.
        limits: Limits of the scheduler.
    """

    def __init__(
        self,
        device: type[SimulatedDevice] = FollowingDevice,
        slots: int | None = 50,
        policy: EvictionPolicyName | None = EvictionPolicyName.LRU,
        **limits: object,
    ) -> None:
        self.limits = dataclasses.replace(LIMITS, **(SETTINGS | limits))
        self.scheduler = Scheduler(self.limits, policy, b"ahead", slots)
        self.device = device(self.scheduler, BLOCK)
        tokenizer = PieceTokenizer(WORDS)
        input_settings = InputSettings(
            tokenizer.tokenize, Vocabulary(tokenizer, WORDS), (END,), 1, lambda word: (), lambda form: None
        )
        self.engine = EngineCore([(self.scheduler, self.device)], input_settings)
        self.records: dict[int, RequestRecord] = {}
        self.params: dict[int, RequestParams] = {}

    def add(self, request_id: int, tokens: tuple[int, ...], **params: object) -> None:
        self.params[request_id] = RequestParams(**({"num_tokens_to_generate": 8} | params))
        self.engine.add(request_id, tokens, self.params[request_id])

    @property
    def ahead(self) -> int:
        return self.scheduler.counters.launched_ahead

    def step(self) -> list[tuple[int, int, int]]:
        """Run a step and return the computed chunks as (request, start, end)."""
        step = self.engine.compute()
        computed = [(one.request.request_id, one.start, one.end) for one in step.chunks]
        for record in self.engine.report(step):
            assert record.request_id not in self.records
            self.records[record.request_id] = record
        self.engine.check()
        return computed

    def run(self) -> None:
        for _ in range(2_000):
            if not self.engine.is_busy:
                break
            self.step()
        assert not self.engine.is_busy, "it does not come to an end"
        assert self.scheduler.cache.available_count == self.limits.total_blocks
        assert self.scheduler.running_slots.free_count == self.limits.max_requests

    def suspend(self) -> None:
        self.engine.suspend()
        self.device.lose_pools()
        self.engine.resume()

    def check_tokens(self) -> None:
        """Check that each request got exactly the tokens of a model that sees its whole sequence."""
        for request_id, record in self.records.items():
            params, tokens = self.params[request_id], list(record.prompt_tokens)
            drawn = random.Random(params.seed)
            for i, token in enumerate(record.generated_tokens):
                state = NOTHING
                for one in tokens if self.device.has_states else ():
                    state = state_after(state, one)
                uniform = None if params.is_greedy else drawn.random()
                assert token == next_token(tokens, state, uniform), f"token {i} of request {request_id}"
                tokens.append(token)
            if record.status is Status.COMPLETED and record.finish_reason == "length":
                assert len(record.generated_tokens) == params.num_tokens_to_generate
            elif record.status is Status.COMPLETED:
                assert record.generated_tokens[-1] == END or params.stop_words
        assert self.records, "no request has ended"


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
            before = self.paper.ahead
            computed = self.paper.step()
            call = ("step", self.paper.ahead > before)
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
        paper.engine.abort(paper.engine.get(call[1]))
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


def replayed(script: list[tuple[object, ...]], paper: Paper) -> list[object]:
    """Replay a script on an engine without launches ahead, which admits no request in steps launched ahead before."""
    seen = []
    for call in script:
        if call[0] == "step":
            limits, async_planner = paper.scheduler.limits, paper.scheduler.async_planner
            if call[1]:
                paper.scheduler.limits = dataclasses.replace(limits, max_requests=0)
                async_planner.note = lambda plan: None
            seen.append(what_there_is(paper, paper.step()))
            paper.scheduler.limits = limits
            vars(async_planner).pop("note", None)
        else:
            tell(paper, call)
    return seen


def outcome(record: RequestRecord) -> object:
    """A record without its times."""
    events = tuple((event.type, event.payload) for event in record.events)
    return dataclasses.replace(record, events=events, arrival_wall_time=0.0, latency=0.0, ttft=None)


LIVES = [
    {},
    {"slots": None},
    {"slots": 3, "total_blocks": 40},
    {"slots": None, "total_blocks": 14, "paused_blocks": 4},
    {"max_requests": 2, "total_blocks": 30, "slots": 1},
    {"async_states": 0},
    {"async_states": 1, "slots": 6},
    {"policy": EvictionPolicyName.REF_ZERO, "total_blocks": 30, "explains": True},
    {"policy": EvictionPolicyName.FLOPS, "total_blocks": 36, "slots": 5},
    {"policy": None, "total_blocks": 24, "paused_blocks": 6},
    {"slots": 4, "aligned_chunks": True, "max_requests": 6, "max_tokens": 16},
]


@pytest.mark.parametrize("number", range(len(LIVES)))
@pytest.mark.parametrize("seed", range(3))
def test_lives_are_those_of_an_engine_that_waits(number, seed):
    """CU-6: equal steps, counts, blocks, snapshots, records and tokens, except that a new request waits a step longer.

    When blocks are short, both evict them a step earlier.
    """
    settings = LIVES[number]
    life = Life(Paper(**settings), random.Random(f"{seed} {number}"))
    life.live(220)
    paper = life.paper
    paper.check_tokens()
    assert paper.ahead > 10, "hardly any step was launched ahead"
    plain = Paper(RefusingDevice if "total_blocks" in settings else SimulatedDevice, **settings)
    for i, (own, others) in enumerate(zip(life.seen, replayed(life.script, plain), strict=True)):
        assert own == others, f"step {i}"
    assert plain.ahead == 0
    assert {name: outcome(one) for name, one in paper.records.items()} == {
        name: outcome(one) for name, one in plain.records.items()
    }


@pytest.mark.parametrize("seed", range(6))
def test_a_failed_step_abandons_the_next_one_too(seed):
    """CU-6: an error in a launch, a launch ahead or a result loses no request and leaves none waiting forever."""
    source = random.Random(f"fails {seed}")
    paper = Paper(total_blocks=60, slots=4)
    failed = added = 0
    for _ in range(150):
        if source.random() < 0.25:
            prompt = tuple(source.randrange(WORDS) for _ in range(source.randint(1, 20)))
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


# One by one


def test_the_row_of_an_ended_request_is_discarded():
    """CU-6: after an unforeseen end the row's result is discarded, and the other request goes on in the same step."""
    paper = Paper(slots=None)
    for request_id, length in ((0, 40), (1, 12)):
        paper.add(request_id, (request_id, 2, 3, 4, 5), num_tokens_to_generate=length, ignore_eos=True)
    paper.step()
    paper.engine.abort(paper.engine.get(0))
    last = paper.device.steps[-1]
    assert [chunk.request_id for chunk in last.chunks] == [0, 1], "it is under way"
    computed = paper.step()
    assert [name for name, *_ in computed] == [1]
    assert paper.device.steps[-1].chunks[0].request_id == 1
    paper.run()
    paper.check_tokens()
    assert paper.records[1].step_count == 12
    assert paper.records[0].step_count == 1


def test_drops_an_in_flight_step_without_living_requests():
    """CU-6: an in-flight step whose requests all ended is dropped, and the next step is planned for new requests."""
    paper = Paper()
    paper.add(0, (1, 2, 3), ignore_eos=True)
    paper.step()
    paper.step()
    paper.engine.abort(paper.engine.get(0))
    paper.step()
    assert paper.engine.replicas[0].ahead._in_flight is None, "it keeps what has ended"
    paper.add(0, (4, 5, 6), num_tokens_to_generate=2, ignore_eos=True)
    assert paper.step() == [(0, 0, 3)]
    paper.records.pop(0, None)
    paper.run()
    paper.check_tokens()


def test_a_new_request_waits_for_at_most_one_step():
    """CU-6: a new request waits for the in-flight step only; a place that becomes free is not passed over."""
    paper = Paper(max_requests=2)
    paper.add(0, (1, 2, 3), num_tokens_to_generate=30, ignore_eos=True)
    for _ in range(4):
        paper.step()
    paper.add(1, (4, 5, 6), num_tokens_to_generate=3, ignore_eos=True)
    assert [name for name, *_ in paper.step()] == [0]
    assert [name for name, *_ in paper.step()] == [0, 1]
    paper.add(2, (7, 8), num_tokens_to_generate=3, ignore_eos=True)
    before = paper.ahead
    assert [[name for name, *_ in paper.step()] for _ in range(3)] == [[0, 1], [0, 1], [0, 2]]
    assert paper.ahead > before, "with all places taken steps are launched ahead"


def test_a_request_without_blocks_does_not_stop_the_others():
    """CU-6: steps are launched ahead while the first in the queue lacks blocks and none has been freed."""
    paper = Paper(slots=None, total_blocks=12)
    paper.add(0, tuple(range(20)), num_tokens_to_generate=8, ignore_eos=True)
    paper.add(1, tuple(range(5, 38)), num_tokens_to_generate=8, ignore_eos=True)
    for _ in range(6):
        paper.step()
    assert len(paper.scheduler.queues.waiting) == 1
    assert paper.ahead >= 3
    paper.run()
    paper.check_tokens()


def test_a_request_that_lacks_blocks_is_admitted_after_the_blocks_that_it_shares_are_published():
    """CU-6: steps stop being launched ahead once the first in the queue matches more, though no block became free.

    Without a snapshot slot the request has no leader to wait for: it needs 5 blocks, 3 are free, then it shares 4.
    """
    paper = Paper(slots=0, total_blocks=7)
    paper.add(0, tuple(range(16)), num_tokens_to_generate=12, ignore_eos=True)
    paper.add(1, (*range(16), 30), num_tokens_to_generate=2, ignore_eos=True)
    computed = [[name for name, *_ in paper.step()] for _ in range(3)]
    assert computed == [[0], [0], [0, 1]]
    assert paper.ahead == 1
    paper.run()
    paper.check_tokens()


def test_blocks_that_end_in_a_step_ahead_leave_their_states():
    """CU-6: no step of decode waits but the first; the next turn resumes from the last of these snapshots."""
    paper = Paper()
    paper.add(0, tuple(range(9)), num_tokens_to_generate=25, ignore_eos=True)
    paper.run()
    assert paper.ahead == 24
    assert paper.scheduler.cache.use().snapshots_replaced > 3
    record = paper.records[0]
    paper.add(1, (*record.prompt_tokens, *record.generated_tokens), num_tokens_to_generate=5, ignore_eos=True)
    paper.run()
    assert paper.records[1].skipped_prefill_token_count == 32
    paper.check_tokens()


def test_a_full_pool_does_not_stop_steps_ahead():
    """CU-6: if no block is free, a step ahead evicts an unused cached block, as a plan does."""
    paper = Paper(total_blocks=14)
    paper.add(0, tuple(range(30)), num_tokens_to_generate=2, ignore_eos=True)
    paper.run()
    paper.add(1, (9, 9, 9), num_tokens_to_generate=40, ignore_eos=True)
    paper.run()
    assert paper.ahead == 1 + 39
    assert paper.scheduler.cache.use().blocks_evicted >= 3
    paper.check_tokens()


@pytest.mark.parametrize("asked", [{"min_p": 0.1, "temperature": 0.8, "seed": 3}, {"min_tokens": 4}, {"seed": 9}])
def test_options_that_ignore_the_last_token_allow_steps_ahead(asked):
    """CU-6: the message of a step ahead is that of the plan but for the token: tokens ruled out, random numbers."""
    messages = []
    for device in (FollowingDevice, SimulatedDevice):
        paper = Paper(device, slots=None)
        paper.add(0, (1, 2, 3), stop_token_ids=(END,), ignore_eos=True, **asked)
        paper.run()
        steps = paper.device.steps
        messages.append([dataclasses.replace(one.chunks[0], token_ids=()) for one in steps])
        assert (paper.ahead > 0) is (device is FollowingDevice)
    shared = min(map(len, messages))
    assert shared > 3
    assert messages[0][:shared] == messages[1][:shared]


@pytest.mark.parametrize("asked", [{"presence_penalty": 0.5}, {"bad_words": ("<3>",)}, {"num_tokens_to_generate": 1}])
def test_steps_that_need_the_token_wait_for_it(asked):
    """CU-6: steps wait if logits depend on generated tokens, and if no request goes on."""
    paper = Paper()
    paper.add(0, (1, 2, 3), ignore_eos=True, **asked)
    for count in (1, 2)[: paper.params[0].num_tokens_to_generate]:
        paper.step()
        assert len(paper.device.steps) == count
    assert paper.ahead == 0


def test_calls_that_need_quiet():
    """CU-6: new weights wait for the device, and lose no token; a suspend computes anew what was under way."""
    paper = Paper()
    paper.add(0, tuple(range(9)), num_tokens_to_generate=20, ignore_eos=True)
    for _ in range(2):
        paper.step()
    assert paper.device.waits
    paper.engine.weights_changed()
    assert not paper.device.waits
    assert paper.step() == [(0, 10, 11)]
    count = len(paper.scheduler.queues.running._requests[0].tokens)
    paper.suspend()
    assert not paper.device.waits
    (request,) = paper.scheduler.queues
    assert len(request.tokens) == count, "the step under way counts"
    paper.run()
    paper.check_tokens()


def test_an_engine_that_is_closed_leaves_nothing_under_way():
    """CU-6: closing an engine, as at the end of a server, leaves no step in flight."""
    paper = Paper()
    paper.add(0, (1, 2, 3, 4), ignore_eos=True)
    paper.step()
    assert paper.device.waits
    paper.engine.close()
    assert not paper.device.waits


def test_an_error_while_all_is_made_quiet_is_the_next_steps():
    """CU-6: the error is raised when the step is taken, and its requests wait again."""
    paper = Paper()
    paper.add(0, (1, 2, 3), ignore_eos=True)
    paper.step()
    paper.device.breaks_at = 0
    paper.engine.weights_changed()
    with pytest.raises(RuntimeError, match="the device is gone"):
        paper.step()
    paper.engine.check()
    assert [one.request_id for one in paper.scheduler.queues.waiting] == [0]
    paper.run()
    paper.check_tokens()


def test_rows_are_told_apart_by_requests():
    """The negative control: rows by id would give a new request the token of the old one."""
    ended, alive = SimpleNamespace(is_ended=True, request_id=3), SimpleNamespace(is_ended=False, request_id=4)
    paper = Paper(slots=None)
    paper.add(3, (1, 2), ignore_eos=True)
    paper.add(4, (1, 2, 3), ignore_eos=True)
    paper.step()
    in_flight = paper.engine.replicas[0].ahead._in_flight
    assert isinstance(in_flight, InFlightStep)
    assert in_flight.living() is in_flight
    chunks = tuple(
        dataclasses.replace(one, request=request) for one, request in zip(in_flight.chunks, (ended, alive), strict=True)
    )
    left = dataclasses.replace(in_flight, plan=dataclasses.replace(in_flight.plan, chunks=chunks)).living()
    assert [one.request_id for one in left.step.chunks] == [4]
    assert left.result().tokens.keys() == {4}


def flight_of(**tables: object) -> InFlightStep:
    """Three chunks on their way, of requests 0 to 2: two decode, the last one prefills."""
    chunks = tuple(
        Chunk(SimpleNamespace(is_ended=False, request_id=i), start, end)
        for i, (start, end) in enumerate([(4, 5), (7, 8), (0, 6)])
    )
    told = tuple(SimpleNamespace(request_id=i, length=chunk.length) for i, chunk in enumerate(chunks))
    result = StepResult(**({"tokens": {0: 5, 1: 6, 2: 7}, "generated": {}, "prompt": {}, "failures": {}} | tables))
    return InFlightStep(plan_of(chunks), ScheduledStep(told, num_decode=2), Computed(result))


@pytest.mark.parametrize("ended", [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_remaining_rows_keep_their_kind(ended):
    """CU-6: remaining rows keep their kind, decode or prefill, whichever rows are discarded."""
    in_flight = flight_of(graph_rows=4)
    for i in ended:
        in_flight.chunks[i].request.is_ended = True
    left, alive = in_flight.living(), [i for i in range(3) if i not in ended]
    if not alive:
        assert left is None
        return
    assert [chunk.request.request_id for chunk in left.chunks] == alive
    assert [chunk.request_id for chunk in left.step.chunks] == alive
    assert left.step.num_decode == sum(i < 2 for i in alive)
    assert left.result().tokens == {i: 5 + i for i in alive}
    assert left.result().graph_rows == 4


def test_void_rows_take_nothing_of_the_others_along():
    """CU-6: scores, failures and tokens after drafts stay with the requests that are alive."""
    score = [Score(-float(i), {i: -1.0}) for i in range(3)]
    tables = {
        "generated": dict(enumerate(score)),
        "prompt": {2: tuple(score)},
        "failures": {0: "no memory", 1: "no memory"},
        "target_tokens": {0: (3,), 1: (4, 5)},
        "target_scores": {0: (score[2],), 1: (score[0], score[1])},
    }
    in_flight = flight_of(**tables)
    in_flight.chunks[0].request.is_ended = True
    result = in_flight.living().result()
    for name, table in tables.items():
        assert getattr(result, name) == {key: value for key, value in table.items() if key != 0}, name


MISTAKES = ["void rows count", "blocks of the next step are others'", "tokens of other rows", "states without names"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_seen(monkeypatch, mistake):
    """The negative controls: each shows in a life."""
    if mistake == "void rows count":
        monkeypatch.setattr(InFlightStep, "living", lambda in_flight: in_flight)
    elif mistake == "blocks of the next step are others'":
        monkeypatch.setattr("megatron_ext.scheduling.async_planning.AsyncPlanner._missing", lambda self, chunk: 0)
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
            life.live(150)
            life.paper.check_tokens()

    with pytest.raises((AssertionError, KeyError, IndexError, RestoreError)):
        live()
