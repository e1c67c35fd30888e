"""Counters, notes and reports of a request after all kinds of events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_ext.scheduling import request_events
from megatron_ext.scheduling.record import Outcome, RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_events import EventType
from tests.unit_tests.scheduling.builders import make_request


def lose(request: Request) -> None:
    """Change the counters as a preemption does."""
    request.computed_end = 0


def counts(request: Request) -> tuple[int, int]:
    return request.ledger.computed, request.ledger.recomputed


def set_clock(monkeypatch: pytest.MonkeyPatch, monotonic: Callable[[], float], wall_clock: Callable[[], float]) -> None:
    """Set the clock of events and requests only: other threads of the test run read the clock too."""
    monkeypatch.setattr(request_events, "time", SimpleNamespace(monotonic=monotonic, time=wall_clock))


def record_of(request: Request) -> RequestRecord:
    return request.to_record("text")


class TestAdvance:
    """computed: prompt tokens, the first time. recomputed: any tokens, again."""

    @settings(max_examples=200, deadline=None)
    @given(data=st.data(), prompt=st.integers(1, 12))
    def test_equals_counting_positions_one_by_one(self, data: st.DataObject, prompt: int):
        request = make_request(0, prompt)
        ever: set[int] = set()
        first_time = again = 0
        for _ in range(data.draw(st.integers(1, 12))):
            if request.computed_end == len(request.tokens):
                request.append(0)
            if data.draw(st.integers(0, 3)) == 0:
                lose(request)
            start, end = request.computed_end, data.draw(st.integers(request.computed_end + 1, len(request.tokens)))
            for position in range(start, end):
                again += position in ever
                first_time += position not in ever and position < prompt
                ever.add(position)
            request.advance(end)
            assert counts(request) == (first_time, again)
            assert request.ledger.computed + request.ledger.recomputed == first_time + again


class TestGenerator:
    def test_a_continued_output_draws_the_numbers_after_its_tokens(self):
        """RL-11: not those that its tokens were sampled with."""
        inputs = make_request(0, prompt=2).inputs
        whole = Request(0, inputs, 0, 11)
        assert whole.rng.current() == Request(0, inputs, 0, 11).rng.current()
        whole.append(3)
        assert Request(0, inputs, 0, 11, continued_tokens=(3,)).rng.current() == whole.rng.current()


def test_scores_of_a_prompt_that_is_computed_again_are_forgotten():
    """RL-2: until its first token, which leaves all that the prompt was scored for; else some would come twice."""
    request = make_request(0, prompt=3)
    for scores in ([], [-2.0]):
        request.output.prompt_log_probs.append(-2.0)
        request.forget_scores()
        assert request.output.prompt_log_probs == scores
        request.append(1)


class TestEvents:
    def test_the_clock_never_goes_back(self, monkeypatch: pytest.MonkeyPatch):
        """KV-10: events do not follow the wall clock, which may be set back."""
        wall_clock = itertools.count(1_000_000, -3600)
        set_clock(monkeypatch, monotonic=time.monotonic, wall_clock=lambda: next(wall_clock))
        request = make_request(0, prompt=2)
        request.append(1)
        request.end(Outcome(Status.COMPLETED, finish_reason="length"))
        stamps = [event.timestamp for event in request.timeline.events]
        assert stamps == sorted(stamps)
        assert record_of(request).arrival_wall_time == request.timeline.arrival_wall_time

    def test_first_token_is_noted_once_whatever_happens_after(self):
        """KV-10: TTFT survives preemption and resume."""
        request = make_request(0, prompt=2)
        request.advance(2)
        request.append(1)
        first = request.timeline.events[-1]
        assert first.type is EventType.FIRST_TOKEN
        request.timeline.note(EventType.EVICT)
        lose(request)
        request.advance(3)
        request.append(1)
        assert [event for event in request.timeline.events if event.type is EventType.FIRST_TOKEN] == [first]
        request.end(Outcome(Status.COMPLETED, finish_reason="length"))
        record = record_of(request)
        assert record.ttft == first.timestamp - request.timeline.events[0].timestamp
        assert 0 < record.ttft <= record.latency
