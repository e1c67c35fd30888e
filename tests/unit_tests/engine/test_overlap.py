"""CU-6: host work between the launch of a step and the reading of its tokens, which changes nothing else."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from types import SimpleNamespace

import pytest

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.executor import Executor
from megatron_ext.engine.input_processor import InputSettings
from megatron_ext.engine.result import StepResult
from megatron_ext.engine.thread import EngineThread
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.text.vocabulary import Vocabulary
from tests.unit_tests.support.simulated_engine import LIMITS
from tests.unit_tests.support.tokenizers import PieceTokenizer

PROMPT = tuple(range(1, 90))


class Device(Executor):
    """Executor with delayed answers that records its calls in order.

    Args:
        notes: Events, in order.
        is_lost: True if the next answer is an error.
    """

    def __init__(self, notes: list[str]) -> None:
        self.notes, self.is_lost = notes, False
        self.steps = []

    def launch(self, step):
        self.steps.append(step)
        self.notes.append("launch")
        answer = StepResult({one.request_id: 3 for one in step.chunks if one.sampling is not None}, {}, {}, {})
        return SimpleNamespace(result=lambda: self._answer(answer))

    def _answer(self, answer: StepResult) -> StepResult:
        self.notes.append("tokens")
        if self.is_lost:
            self.is_lost = False
            raise RuntimeError("the device is gone")
        return answer


class AtOnce(Executor):
    """Executor without a separate launch."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def execute(self, step) -> StepResult:
        self.notes.append("execute")
        return StepResult({one.request_id: 3 for one in step.chunks if one.sampling is not None}, {}, {}, {})


def new_engine(executor, notes: list[str]) -> EngineCore:
    limits = dataclasses.replace(LIMITS, block_size=16, max_tokens=64, max_sequence_length=100_000, total_blocks=20_000)
    scheduler = Scheduler(limits, EvictionPolicyName.LRU, b"overlap", None)
    tokenizer = PieceTokenizer(97)
    input_settings = InputSettings(
        tokenizer.tokenize, Vocabulary(tokenizer, 97), (), 1, lambda word: (), lambda form: None
    )
    engine = EngineCore([(scheduler, executor)], input_settings)
    for name in ("schedule", "commit"):
        _note_calls(scheduler, name, notes)
    engine.host_work = lambda: notes.append("intake")
    return engine


def _note_calls(owner: object, name: str, notes: list[str]) -> None:
    function = getattr(owner, name)

    def noted(*arguments):
        notes.append(name)
        return function(*arguments)

    setattr(owner, name, noted)


def add(engine: EngineCore, request_id: int, tokens=PROMPT) -> None:
    engine.add(request_id, RequestInputs(tokens, RequestParams(num_tokens_to_generate=3, ignore_eos=True)))


def test_the_host_works_while_the_device_computes():
    """CU-6: between launch and tokens, and nowhere else; planning and the commit wait."""
    notes: list[str] = []
    engine = new_engine(Device(notes), notes)
    add(engine, 0)
    engine.report(engine.compute())
    assert notes == ["schedule", "launch", "intake", "tokens", "commit"]
    notes.clear()
    engine = new_engine(AtOnce(notes), notes)
    add(engine, 0)
    engine.compute()
    assert notes == ["schedule", "execute", "intake", "commit"]


@pytest.mark.parametrize("tokens", [PROMPT, PROMPT[:40], tuple(i % 90 for i in range(50_000))])
def test_a_request_added_during_a_step_is_planned_as_if_added_after_it(tokens):
    """CU-6: steps, events and counts are those of requests that came between two steps."""
    found = []
    for is_early in (True, False):
        notes: list[str] = []
        device = Device(notes)
        engine = new_engine(device, notes)
        add(engine, 0)
        engine.report(engine.compute())
        for request_id in (1, 2):
            if is_early:
                engine.host_work = partial(add, engine, request_id, tokens)
            records = engine.report(engine.compute())
            engine.host_work = lambda: None
            if not is_early:
                add(engine, request_id, tokens)
        while engine.is_busy and len(device.steps) < 30:
            records += engine.report(engine.compute())
            engine.check()
        events = {one.request_id: [event.type for event in one.events] for one in records}
        found.append((device.steps, events, engine.counters))
    assert found[0] == found[1]


def test_requests_are_taken_in_up_to_the_first_other_call():
    """CU-6: requests are taken in order of submission; calls that the step must not see wait for its end."""
    notes: list[str] = []
    engine = new_engine(AtOnce([]), [])
    thread = EngineThread(engine)
    begun, submitted = threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        submitted.wait(60)
        engine.host_work()
        notes.append("step ends")

    def take(name: str) -> str:
        notes.append(name)
        return name

    def between_steps(name: str) -> str:
        notes.append("between")
        return take(name)

    def submit_requests(name: str) -> Future[str]:
        return thread.submit(partial(between_steps, name), take_in=partial(take, name))

    running = thread.submit(step)
    begun.wait(60)
    first = submit_requests("first")
    cancelled = submit_requests("cancelled")
    assert cancelled.cancel()
    second = submit_requests("second")
    call = thread.submit(partial(notes.append, "abort"))
    third = submit_requests("third")
    submitted.set()
    assert [one.result(60) for one in (running, first, second, call, third)] == [None, "first", "second", None, "third"]
    with pytest.raises(CancelledError):
        cancelled.result()
    assert notes == ["first", "second", "step ends", "abort", "between", "third"]
    thread.close()
    with pytest.raises(RuntimeError):
        thread.submit(step)
