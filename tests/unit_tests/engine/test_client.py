"""Engine client over a simulated device: requests that are left, failed steps, pauses, and waits for its thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from megatron_ext.config import RequestParams
from megatron_ext.engine.client import FAILED_STEPS, EngineClient
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.thread import complete, result_of
from megatron_ext.errors import EngineClosed
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request_inputs import RequestInputs
from tests.unit_tests.support.holding import PATIENCE
from tests.unit_tests.support.paper_engine import Paper

TOKENS = 50


@pytest.fixture
def paper() -> Paper:
    return Paper(slots=None)


@pytest.fixture
def client(paper: Paper) -> Iterator[EngineClient]:
    client = EngineClient(paper.engine)
    yield client
    client.close()


def submit(client: EngineClient, first: int = 1) -> EngineRequest:
    params = RequestParams(num_tokens_to_generate=TOKENS, ignore_eos=True)
    request = EngineRequest(RequestInputs((first, 2, 3), params), is_streamed=True)
    client.submit([request]).result(PATIENCE)
    return request


def outcome(client: EngineClient, request: EngineRequest) -> RequestRecord:
    """Record of a request, for which enough steps are taken between calls."""
    for _ in range(2 * TOKENS):
        client.call(lambda: None).result(PATIENCE)
    return request.record.result(0)


def test_the_first_token_of_every_sample_is_delivered_with_its_step(client):
    """KV-6: a stream gets one token a step, and the samples that take over a prompt wait for no second one."""
    seen: list[list[int]] = [[], [], []]

    def note(number: int) -> None:
        while requests[number].updates:
            seen[number].append(len(requests[number].updates.popleft().generated_tokens))

    params = RequestParams(num_tokens_to_generate=3, ignore_eos=True, temperature=0.8)
    requests = [
        EngineRequest(
            RequestInputs((1, 2, 3), dataclasses.replace(params, seed=number)),
            is_streamed=True,
            notify=partial(note, number),
        )
        for number in range(3)
    ]
    client.submit(requests).result(PATIENCE)
    for request in requests:
        request.record.result(PATIENCE)
    assert [counts[0] for counts in seen] == [1, 1, 1]


@pytest.mark.parametrize("way", ["abandoned", "unreachable"])
def test_a_request_that_is_left_during_a_step_ends_before_the_next_one(client, way):
    """PY-5, TE-6: without another call, and also if its reader has gone and cannot be told."""

    def leave() -> None:
        if way == "unreachable":
            raise RuntimeError("Event loop is closed")
        client.abort([request])

    params = RequestParams(num_tokens_to_generate=TOKENS, ignore_eos=True)
    request = EngineRequest(RequestInputs((1, 2, 3), params), is_streamed=True, notify=leave)
    client.submit([request]).result(PATIENCE)
    record = request.record.result(PATIENCE)
    assert (record.status, len(record.generated_tokens)) == (Status.ABORTED, 1)


@pytest.mark.parametrize("times", range(FAILED_STEPS - 1, FAILED_STEPS + 2))
def test_requests_of_steps_that_fail_in_a_row(client, paper, monkeypatch, times):
    """PY-5: they are tried again, then end with the error; the next request is computed, and they own nothing."""
    step, left = paper.engine.step, iter(range(times))

    def fail_or_step() -> object:
        if next(left, None) is not None:
            raise RuntimeError("the device is gone")
        return step()

    monkeypatch.setattr(paper.engine, "step", fail_or_step)
    request = submit(client)
    if times > FAILED_STEPS:
        with pytest.raises(RuntimeError, match="the device is gone"):
            outcome(client, request)
    else:
        is_given_up = times == FAILED_STEPS
        assert outcome(client, request).status is (Status.FAILED if is_given_up else Status.COMPLETED)
    assert outcome(client, submit(client)).status is Status.COMPLETED
    assert not client.is_busy


def test_a_timer_ends_its_own_pause_only(client):
    """PY-5: a pause that replaced another one lasts until it is resumed."""
    client.pause(max_seconds=1000)
    first = client.pausing
    client.pause()
    client.call(client._time_out, first).result(PATIENCE)
    assert client.pausing is not None
    assert first._timer.finished.is_set(), "it does not run for 1000 s"


def test_a_request_that_is_left_during_a_pause_has_its_record_at_once(client):
    """PY-5: a reader that waits for it does not wait for the end of the pause."""
    client.pause()
    request = submit(client)
    client.abort([request], at_once=True)
    client.call(lambda: None).result(PATIENCE)
    assert request.record.result(0).status is Status.ABORTED


def test_requests_wait_for_a_call_that_waits_for_those_before(client, paper):
    """RL-3: those before it end with the old weights, those after it have the new ones."""
    client.pause()
    before = submit(client)
    update = client.call_when_idle(lambda: paper.engine.weights_changed(version=5))
    after = EngineRequest(before.inputs)
    added = client.submit([after])
    client.unpause()
    for future in (update, added):
        future.result(PATIENCE)
    assert [one.record.result(PATIENCE).weights_version for one in (before, after)] == [((0, TOKENS),), ((5, TOKENS),)]


def test_requests_wait_for_each_call_that_came_before_them(client):
    """RL-3: a request that passed a call would be answered with old weights, or with half of them."""

    def note(name: str) -> None:
        made.append((name, held.done(), later.done()))

    client.pause()
    made: list[tuple[str, bool, bool]] = []
    before = submit(client)
    calls = [client.call_when_idle(note, name) for name in "ab"]
    held = client.submit([EngineRequest(before.inputs)])
    calls.append(client.call_when_idle(note, "c"))
    later = client.submit([EngineRequest(before.inputs)])
    client.call(lambda: None).result(PATIENCE)
    assert made == [], "a request before them has not ended"
    client.unpause()
    for future in (*calls, held, later):
        future.result(PATIENCE)
    assert made == [(name, False, False) for name in "abc"]


def test_a_call_that_was_given_up_is_not_made():
    """RL-3: its caller has gone, and an answer would end the engine's thread with an error."""
    future: Future[int] = Future()
    assert future.cancel()
    complete(future, lambda: 1 / 0)
    future = Future()
    complete(future, lambda: 1 / 0)
    assert isinstance(future.exception(0), ZeroDivisionError)


def test_a_wait_for_the_thread_is_one_of_many_short_ones(monkeypatch):
    """SE-4: the main thread handles a signal that has come in another thread once it wakes by itself."""
    future: Future[str] = Future()
    seconds: list[float] = []

    def wait(_: object, most: float) -> None:
        seconds.append(most)
        if len(seconds) == 3:
            future.set_result("ended")

    monkeypatch.setattr("megatron_ext.engine.thread.wait", wait)
    monkeypatch.setattr(future, "result", partial(future.result, 0))
    assert result_of(future) == "ended"
    assert max(seconds) < 1


def test_nothing_waits_for_an_engine_that_fails_to_close(paper, monkeypatch):
    """PY-5: the error is the caller's; calls and requests behind a call that waits for an idle engine end, too."""

    def fail() -> None:
        raise ZeroDivisionError("planted")

    client = EngineClient(paper.engine)
    client.pause()  # first, so that the request cannot end before
    submit(client)
    called = client.call_when_idle(lambda: None)
    held = client.submit([EngineRequest(RequestInputs((1, 2), RequestParams(num_tokens_to_generate=1)))])
    monkeypatch.setattr(paper.engine, "close", fail)
    with pytest.raises(ZeroDivisionError):
        client.close()
    for waiting in (called, held):
        with pytest.raises(EngineClosed):
            waiting.result(0)
