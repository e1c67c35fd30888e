"""SE-10: masks computed in a thread: their order, masks of drafts, and the time that a step waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from megatron_ext.engine.structured_output import IDLE_WAIT, WAIT_SHARE, Job, MaskThread, StructuredOutputManager
from megatron_ext.scheduling.scheduler import Scheduler
from tests.unit_tests.scheduling.builders import LIMITS, add, request_of

PATIENCE = 60.0  # seconds until a test gives up; nothing is measured
REGEX = {"type": "regex", "regex": "[ab]*"}


class Grammar:
    """Matcher that allows token 9 nowhere and no token after token 8.

    Args:
        seconds: Expected time of a mask.
        before: Called before each mask.
        tokens: So far.
    """

    def __init__(
        self, seconds: float = 0.0, before: Callable[[], object] = lambda: None, tokens: tuple[int, ...] = ()
    ) -> None:
        self.seconds, self._before, self._tokens = seconds, before, tokens

    def copy(self) -> Grammar:
        return Grammar(self.seconds, self._before, self._tokens)

    def take(self, tokens: Sequence[int]) -> None:
        if 9 in tokens:
            raise ValueError("9 cannot come")
        self._tokens += tuple(tokens)

    def allowed(self, ends: Sequence[int]) -> bytes:
        self._before()
        if self._tokens[-1:] == (8,):
            raise ValueError("nothing can come")
        return bytes(self._tokens)


@pytest.mark.parametrize(
    ("drafts", "allowed"),
    [((), ()), ((5, 6), (5, 6)), ((5, 9, 6), (5,)), ((9,), ()), ((5, 8, 6), (5,))],
)
def test_masks_after_drafts(drafts, allowed):
    """Masks cover as many drafts as the grammar allows, one after each; the matcher's state stays before the drafts."""
    job = Job(Grammar(), None, (1, 2), drafts, ())
    job.run()
    assert job.error is None
    assert job.drafts == allowed
    assert job.masks == tuple(bytes((1, 2, *allowed[:i])) for i in range(len(allowed) + 1))
    assert job.matcher.allowed(()) == bytes((1, 2))


@pytest.mark.parametrize("tokens", [(1, 9), (8,)])
def test_an_answer_that_cannot_go_on(tokens):
    job = Job(Grammar(), None, tokens, (), ())
    job.run()
    assert isinstance(job.error, ValueError)
    assert not job.masks


def test_cheap_masks_go_first():
    """A slow mask waits for cheaper ones that arrive later, and masks are computed on their own thread."""
    thread, may_go, order = MaskThread(), threading.Event(), []

    def submit(name: str, seconds: float, before: Callable[[], object]) -> Job:
        job = Job(Grammar(seconds, lambda: (before(), order.append((name, threading.get_ident())))), None, (), (), ())
        thread.submit(job)
        return job

    first = submit("first", 0.0, lambda: may_go.wait(PATIENCE))
    jobs = [first, submit("costly", 60.0, lambda: None), submit("cheap", 0.0, lambda: None)]
    may_go.set()
    assert thread.wait(lambda: all(job.is_done for job in jobs), PATIENCE)
    assert [name for name, _ in order] == ["first", "cheap", "costly"]
    assert {ident for _, ident in order}.isdisjoint({threading.get_ident()})
    assert len({ident for _, ident in order}) == 1


class Clock(MaskThread):
    """Thread stand-in that computes nothing and notes the waiting times."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def submit(self, job: Job) -> None:
        """Never done."""

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> bool:
        self.waits.append(seconds)
        return is_enough()


@pytest.mark.parametrize("has_other_work", [False, True])
def test_a_step_waits_for_a_share_of_the_one_before(has_other_work):
    """A step waits longer only if no other request can go on, and not at all without a missing mask."""
    clock, scheduler = Clock(), Scheduler(LIMITS)
    outputs = StructuredOutputManager(scheduler, lambda form: Grammar(), clock)
    request = request_of(0, range(5), num_tokens_to_generate=3, response_format=REGEX)
    add(scheduler, request)
    outputs.add(request)
    outputs.begin({})
    outputs.wait(2.0, has_other_work=has_other_work)
    assert clock.waits == []
    assert not request.lacks_mask
    request.append(7)
    assert request.lacks_mask
    outputs.begin({})
    outputs.wait(2.0, has_other_work=has_other_work)
    assert clock.waits == ([2.0 * WAIT_SHARE] if has_other_work else [2.0 * WAIT_SHARE, IDLE_WAIT])
    assert list(outputs.take()) == []
