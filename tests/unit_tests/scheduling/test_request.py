"""Counters, notes and reports of a request after all kinds of events."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_ext.scheduling import request_events
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.explanation import Reason
from megatron_ext.scheduling.record import Outcome, RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_events import Event, EventType
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
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

    def test_prefill_then_decode(self):
        request = make_request(0, prompt=5)
        request.advance(5)
        request.append(1)
        request.advance(6)
        assert counts(request) == (5, 0)
        assert request.computed_end == 6
        assert request.timeline.step_count == 2

    def test_chunked_prefill(self):
        request = make_request(0, prompt=10)
        for end in (4, 8, 10):
            request.advance(end)
        assert counts(request) == (10, 0)
        assert request.timeline.step_count == 3

    def test_preempted_in_decode(self):
        request = make_request(0, prompt=5)
        request.advance(5)
        for end in (6, 7, 8):
            request.append(end)
            request.advance(end)
        request.append(9)  # the newest token was never computed
        lose(request)
        request.advance(9)
        # 8 tokens were computed before; the newest is neither prompt nor computed again.
        assert counts(request) == (5, 8)

    def test_preempted_within_the_second_prefill(self):
        request = make_request(0, prompt=6, generated=2)
        request.advance(7)
        lose(request)
        request.advance(3)
        assert counts(request) == (6, 3)
        lose(request)
        request.advance(5)
        assert counts(request) == (6, 8)
        request.advance(8)
        assert counts(request) == (6, 10)

    def test_suspended_within_the_first_prefill(self):
        """The chunk that goes beyond what was known is partly again, partly new."""
        request = make_request(0, prompt=10)
        request.advance(4)
        lose(request)
        request.advance(6)
        assert counts(request) == (6, 4)
        lose(request)
        request.advance(10)
        assert counts(request) == (10, 10)

    def test_losing_nothing_costs_nothing(self):
        request = make_request(0, prompt=3)
        lose(request)
        request.advance(3)
        assert counts(request) == (3, 0)

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
            assert request.ledger.prefilled == first_time + again


class TestPlace:
    """Decoding: only the newest token, a generated one, is left."""

    @pytest.mark.parametrize(
        ("prompt", "generated", "computed", "expected"),
        [
            (1, 0, 0, False),  # a prompt of one token is prefill
            (5, 0, 4, False),
            (5, 1, 5, True),
            (5, 1, 4, False),
            (5, 3, 7, True),
            (5, 3, 6, False),
            (5, 3, 0, False),
        ],
    )
    def test_is_decoding(self, prompt: int, generated: int, computed: int, expected: bool):
        request = make_request(0, prompt, generated)
        request.computed_end = computed
        assert request.is_decoding is expected

    def test_chunk(self):
        request = make_request(0, prompt=5, generated=3)
        inner, last = Chunk(request, 6, 7), Chunk(request, 7, 8)
        assert (inner.length, inner.is_decode, inner.yields_token) == (1, True, False)
        assert (last.is_decode, last.yields_token) == (True, True)
        whole = Chunk(request, 0, 8)
        assert (whole.length, whole.is_decode, whole.yields_token) == (8, False, True)
        assert not Chunk(request, 4, 5).is_decode


class TestGenerator:
    def test_it_depends_on_the_seed_alone(self):
        def draws(arrival: int, seed: int | str) -> list[float]:
            request = Request(arrival, RequestInputs((1,), make_request(0, 1).params), arrival=arrival, seed=seed)
            drawn = []
            for token in range(5):
                drawn.append(request.rng.current())
                request.append(token)
            return drawn

        assert draws(0, 11) == draws(1, 11)
        assert draws(0, "1234/0") == draws(3, "1234/0")
        assert draws(0, "1234/0") != draws(0, "1234/1")
        assert len(set(draws(0, 11))) == 5

    def test_a_continued_output_draws_the_numbers_after_its_tokens(self):
        """RL-11: not those that its tokens were sampled with."""
        inputs = make_request(0, prompt=2).inputs
        whole = Request(0, inputs, 0, 11)
        assert whole.rng.current() == Request(0, inputs, 0, 11).rng.current()
        whole.append(3)
        assert Request(0, inputs, 0, 11, continued_tokens=(3,)).rng.current() == whole.rng.current()

    def test_a_repeated_step_draws_the_same_number(self):
        request, other = make_request(0, prompt=2), make_request(0, prompt=2)
        first = request.rng.current()
        assert request.rng.current() == first == other.rng.current()
        request.append(1)
        other.append(1)
        assert request.rng.current() == other.rng.current() != first


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

    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            (Status.COMPLETED, ["FINISH"]),
            (Status.FAILED, ["ERROR_NONTRANSIENT", "FAIL"]),
            (Status.ABORTED, []),
        ],
    )
    def test_events_of_an_end(self, status: Status, expected: list[str]):
        request = make_request(0, prompt=2)
        request.end(Outcome(status, error="why" if status is Status.FAILED else None))
        assert [event.type.name for event in request.timeline.events] == ["ADD_ENGINE", *expected]
        if status is Status.FAILED:
            assert request.timeline.events[1].payload == "why"

    def test_a_request_cannot_end_twice(self):
        request = make_request(0, prompt=2)
        request.end(Outcome(Status.ABORTED))
        with pytest.raises(AssertionError, match="ended twice"):
            request.end(Outcome(Status.COMPLETED))

    def test_as_in_the_json_output(self):
        event = Event(EventType.ERROR_TRANSIENT, 1.5, "why")
        assert event.to_dict() == {"type": "ERROR_TRANSIENT", "timestamp": 1.5, "payload": "why"}


class TestRecord:
    def test_a_living_request_has_none(self):
        with pytest.raises(AssertionError, match="still alive"):
            record_of(make_request(0, prompt=2))

    def test_a_completed_request(self):
        request = make_request(3, prompt=2, generated=2, return_log_probs=True, top_n_logprobs=1)
        request.output.prompt_log_probs, request.output.prompt_top_n = [-1.0], [{5: -0.5}]
        request.output.generated_log_probs, request.output.generated_top_n = [-2.0, -3.0], [{6: -0.1}, {7: -0.2}]
        request.ledger.general_reason = Reason.CACHING_OFF
        request.ledger.admit(0, 0, 4)
        request.advance(2)
        request.advance(3)
        request.end(Outcome(Status.COMPLETED, finish_reason="length"))
        record = request.to_record("generated")
        assert (record.request_id, record.status, record.finish_reason, record.error) == (
            103,
            Status.COMPLETED,
            "length",
            None,
        )
        assert (record.prompt_text, record.prompt_tokens, record.prompt_token_count) == (None, (3000, 3001), 2)
        assert (record.generated_text, record.generated_tokens) == ("generated", (3002, 3003))
        assert record.prompt_log_probs == (-1.0,)
        assert record.generated_log_probs == (-2.0, -3.0)
        assert record.prompt_top_n_log_probs == ({5: -0.5},)
        assert record.generated_top_n_log_probs == ({6: -0.1}, {7: -0.2})
        assert (record.computed_prefill_token_count, record.skipped_prefill_token_count) == (2, 0)
        assert record.prefill_reasons == {"caching_off": 2}
        assert record.step_count == 2
        assert record.events == tuple(request.timeline.events)

    @pytest.mark.parametrize(
        ("params", "given"),
        [
            ({}, (False, False, False, False)),
            ({"return_log_probs": True}, (True, True, False, False)),
            ({"return_log_probs": True, "skip_prompt_log_probs": True}, (False, True, False, False)),
            ({"return_log_probs": True, "top_n_logprobs": 2}, (True, True, True, True)),
            (
                {"return_log_probs": True, "skip_prompt_log_probs": True, "top_n_logprobs": 2},
                (False, True, False, True),
            ),
        ],
    )
    def test_log_probs_are_there_if_they_were_asked_for(self, params: dict, given: tuple[bool, ...]):
        request = make_request(0, 2, 1, **params)
        request.end(Outcome(Status.COMPLETED))
        record = record_of(request)
        fields = (
            record.prompt_log_probs,
            record.generated_log_probs,
            record.prompt_top_n_log_probs,
            record.generated_top_n_log_probs,
        )
        assert tuple(field is not None for field in fields) == given

    def test_a_request_that_never_ran(self):
        request = make_request(0, prompt=2)
        request.end(Outcome(Status.FAILED, error="too long"))
        record = record_of(request)
        assert record.ttft is None
        assert record.latency >= 0
        assert record.prefill_reasons == {}
        assert (record.status, record.error, record.generated_tokens) == (Status.FAILED, "too long", ())

    def test_latency_of_an_aborted_request_goes_on_until_the_abort(self, monkeypatch: pytest.MonkeyPatch):
        """An abort is no event, but it takes its time all the same."""
        now = iter([10.0, 11.0, 15.0])
        set_clock(monkeypatch, monotonic=lambda: next(now), wall_clock=time.time)
        request = make_request(0, prompt=2)
        request.append(1)
        request.end(Outcome(Status.ABORTED))
        record = record_of(request)
        assert (record.ttft, record.latency) == (1.0, 5.0)

    def test_the_prompt_text_is_the_submitted_one(self):
        request = Request(0, RequestInputs((1, 2), make_request(0, 1).params, ""), 0, 0)
        request.end(Outcome(Status.ABORTED))
        assert record_of(request).prompt_text == ""


class TestParts:
    """Each part has one writer; the request's own names only read."""

    def test_the_inputs_are_immutable(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            make_request(0, prompt=2).inputs.prompt_tokens = (5,)

    @pytest.mark.parametrize("name", ["generated_tokens", "block_hashes", "status", "finish_reason"])
    def test_nothing_is_written_through_the_request(self, name: str):
        with pytest.raises(AttributeError):
            setattr(make_request(0, prompt=2), name, None)

    def test_preemption_returns_blocks_and_slot(self):
        request = make_request(0, prompt=6)
        request.block_table, request.running_slot, request.snapshots = (3, 4), 1, [Snapshot(4, b"d", 0)]
        request.computed_end = request.shared_end = 4
        assert request.reset() == ((3, 4), [Snapshot(4, b"d", 0)], 1)
        assert (request.block_table, request.running_slot, request.snapshots, request.shared_end) == ((), None, [], 0)
        assert (request.computed_end, len(request.tokens)) == (0, 6)
