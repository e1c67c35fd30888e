"""Calls that wait until all requests have ended, and requests that wait for those calls (RL-3)."""

from __future__ import annotations

from concurrent.futures import Future

from megatron_ext.engine.thread import IdleGate, complete


def test_requests_wait_for_each_call_that_came_before_them():
    """RL-3: a request that passed a gate that was shut again would be answered with old weights, or with half of them.

    Calls are made in their order, each once the requests before it have been added.
    """
    gate, made = IdleGate(), []
    assert gate.hold(()) is None, "it is open"
    first, second, third = (gate.close(lambda name=name: made.append(name)) for name in "abc")
    held = gate.hold(["x"])
    assert gate.open() == []
    assert made == [], "requests before the calls are still to be added"
    first()
    second()
    assert gate.open() == []
    assert made == ["a", "b"]
    later = gate.hold(["y"])
    third()
    assert [future for _, future in gate.open()] == [held, later]
    assert made == ["a", "b", "c"]
    assert gate.hold(()) is None
    assert gate.open() == [], "each is submitted once"


def test_a_call_that_was_given_up_is_not_made():
    """RL-3: its caller has gone, and an answer would end the engine's thread with an error."""
    future: Future[int] = Future()
    assert future.cancel()
    complete(future, lambda: 1 / 0)
    future = Future()
    complete(future, lambda: 1 / 0)
    assert isinstance(future.exception(0), ZeroDivisionError)
