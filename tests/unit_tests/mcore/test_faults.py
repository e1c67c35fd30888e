"""SE-2, EX-8: an error at any place of a step ends at most the request that it concerns; others are not affected."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Iterator

import pytest

from megatron_ext.engine import output_processor
from megatron_ext.engine.output_processor import OutputProcessor
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.text.detokenizer import StopWordMatcher
from tests.unit_tests.support.driver import Driver, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver, build_driver
from tests.unit_tests.support.models import HYBRID
from tests.unit_tests.support.tokenizers import PieceTokenizer

VICTIM = 1
PROMPTS = {0: make_prompt(20), VICTIM: make_prompt(37), 2: make_prompt(70), 3: make_prompt(5)}
KINDS = ("hybrid", "attention_only")


class Planted(Exception):
    """Injected error."""


def submit(driver: Driver) -> dict[int, asyncio.Future]:
    """Four requests that prefill, decode and stop by words beside each other."""
    return {
        name: driver.add(name, prompt, num_tokens_to_generate=9, stop_words=("no such word",))
        for name, prompt in PROMPTS.items()
    }


@pytest.fixture(scope="module")
def expected(get_driver) -> Callable[[str], dict[int, tuple[int, ...]]]:
    """Tokens of a run without an error."""

    @functools.cache
    def of(kind: str = "hybrid") -> dict[int, tuple[int, ...]]:
        driver = get_driver(kind, max_tokens=60)
        submit(driver)
        return {name: record.generated_tokens for name, record in driver.run().items()}

    return of


def at_call(function: Callable, which: int, error: Exception, *, of: Callable[..., bool] = lambda *_: True) -> Callable:
    """`function`, but its `which`-th call of those that `of` knows raises."""
    calls = iter(range(1_000_000))

    def call(*args: object, **kwargs: object) -> object:
        if of(*args) and next(calls) == which:
            raise error
        return function(*args, **kwargs)

    return call


def detokenize(driver: Driver, patch: pytest.MonkeyPatch, error: Exception) -> None:
    text = driver.engine.core.output._requests[VICTIM][2]._text
    patch.setattr(text, "_detokenize", at_call(text._detokenize, 3, error))


def feed(driver: Driver, patch: pytest.MonkeyPatch, error: Exception, which: int = 2) -> None:
    matcher = driver.engine.core.output._requests[VICTIM][2]
    broken = at_call(StopWordMatcher.feed, which, error, of=lambda one, *_: one is matcher)
    patch.setattr(StopWordMatcher, "feed", broken)


def victims(owner: object, name: str, which: int = 0) -> Callable[..., None]:
    """A function that lets a call for the victim raise; the victim is the first or the second argument."""

    def inject(_: Driver, patch: pytest.MonkeyPatch, error: Exception) -> None:
        def is_victims(*args: object) -> bool:
            return any(isinstance(one, Request) and one.request_id == VICTIM for one in args[:2])

        patch.setattr(owner, name, at_call(getattr(owner, name), which, error, of=is_victims))

    return inject


ENDS_ONE: dict[str, Callable[..., None]] = {
    "detokenize_while_matching": detokenize,
    "matcher": feed,
    "matcher_at_the_last_token": functools.partial(feed, which=8),  # the commit has ended the request already
    "scores": victims(output_processor, "_note_scores", 4),
    "generated_text": victims(OutputProcessor, "_generated_text"),
    "record": victims(Request, "to_record"),
}


def assert_nothing_is_left(driver: Driver) -> None:
    """Check that no blocks, slots of either kind, futures or matchers are in use."""
    engine, scheduler = driver.engine, driver.scheduler
    engine.check()
    assert not engine.has_unfinished_requests()
    assert not engine.core.output._requests
    assert not engine.core.output.ended
    assert driver.free_blocks == scheduler.cache.pool.total
    assert scheduler.running_slots.free_count == scheduler.running_slots.total
    if scheduler.cache.states is not None:
        assert scheduler.cache.states.obtainable_count == scheduler.cache.states.total
    assert not scheduler.pending_blocks.requests()


@pytest.mark.parametrize(("place", "kind"), list(zip(ENDS_ONE, itertools.cycle(KINDS), strict=False)))
def test_an_error_of_one_request_ends_it_and_nothing_else(get_driver, expected, monkeypatch, place, kind):
    """SE-2: the request ends as FAILED with the error's text; the others' tokens equal a run without the error."""
    tokens = expected(kind)
    driver = get_driver(kind, max_tokens=60)
    futures = submit(driver)
    ENDS_ONE[place](driver, monkeypatch, Planted("the tokenizer is gone"))
    records = driver.run()
    victim = records.pop(VICTIM)
    assert (victim.status, victim.error) == (Status.FAILED, "Planted: the tokenizer is gone")
    assert victim.is_fault
    assert victim.finish_reason is None
    assert tokens[VICTIM][: len(victim.generated_tokens)] == victim.generated_tokens
    assert [event.type.name for event in victim.events[-2:]] == ["ERROR_NONTRANSIENT", "FAIL"]
    assert "FINISH" not in [event.type.name for event in victim.events]
    assert {name: record.generated_tokens for name, record in records.items()} == {
        name: tokens[name] for name in records
    }
    assert all(record.status is Status.COMPLETED for record in records.values())
    assert futures[VICTIM].result() is victim
    assert driver.engine.core.error_isolation.count == 1
    assert_nothing_is_left(driver)


def test_a_tokenizer_that_knows_one_token_less(get_driver):
    """SE-2: the tokenizer raises wherever the token appears; requests that never generate the token are served."""

    class Partial(PieceTokenizer):
        def detokenize(self, ids, skip_special_tokens=True):
            if 97 in ids or self.bad in ids:
                raise KeyError(self.bad)
            return super().detokenize(ids, skip_special_tokens)

    tokenizer = Partial(HYBRID.vocab_size)
    tokenizer.bad = 1000
    plain = get_driver(tokenizer=tokenizer)
    for name, prompt in PROMPTS.items():
        plain.add(name, prompt, stop_words=("none",) if name % 2 else ())
    before = {name: record.generated_tokens for name, record in plain.run().items()}
    lists = {name: set(tokens) for name, tokens in before.items()}  # a prompt of ids is never read
    tokenizer.bad = next(token for token in before[VICTIM] if sum(token in one for one in lists.values()) < 4)
    driver = get_driver(tokenizer=tokenizer)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt, stop_words=("none",) if name % 2 else ())
    records = driver.run()
    for name, record in records.items():
        if tokenizer.bad in lists[name]:
            assert (record.status, record.error) == (Status.FAILED, f"KeyError: {tokenizer.bad}")
        else:
            assert (record.status, record.generated_tokens) == (Status.COMPLETED, before[name])
    assert_nothing_is_left(driver)


def test_a_record_that_fails_again_and_again(get_driver, monkeypatch):
    """SE-2: every record of the run, that of an aborted request and that of a refused one included."""
    driver = get_driver(block_count=8)
    submit(driver)
    driver.add(7, make_prompt(1000))  # too long for the pool

    def fail(*_: object) -> None:
        raise Planted("again")

    monkeypatch.setattr(Request, "to_record", fail)
    driver.step()
    driver.engine.abort_request(2)
    driver.run()
    assert {record.status for record in driver.records.values()} == {Status.FAILED}
    assert driver.records[0].error == driver.records[2].error == "Planted: again"
    assert "cannot be served" in driver.records[7].error
    assert_nothing_is_left(driver)


@pytest.fixture
def broken_log() -> Iterator[None]:
    """A handler that raises, whatever is logged."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise Planted("the disk is full")

    handler, log = Broken(), logging.getLogger("megatron_ext")
    log.addHandler(handler)
    before, log.level = log.level, logging.INFO
    yield
    log.removeHandler(handler)
    log.level = before


class TestErrorsThatEndNoRequest:
    """SE-2: futures, statistics, log lines."""

    def check(self, driver: Driver, tokens: dict[int, tuple[int, ...]]) -> None:
        records = driver.run()
        assert {name: record.generated_tokens for name, record in records.items()} == tokens
        assert all(record.status is Status.COMPLETED for record in records.values())
        assert_nothing_is_left(driver)

    def test_a_future_that_takes_no_result(self, get_driver, expected, caplog):
        driver = get_driver(max_tokens=60)
        submit(driver)

        class Closed(asyncio.Future):
            def set_result(self, _: object) -> None:
                raise Planted("the loop is closed")

        for request_id in driver.engine._futures:
            driver.engine._futures[request_id] = Closed(loop=driver.engine._loop)
        self.check(driver, expected())
        assert driver.engine.core.error_isolation.count == 4
        assert sum("the future of a request failed" in record.message for record in caplog.records) == 1

    @pytest.mark.parametrize("part", ["line", "use"])
    def test_statistics_and_log_lines(self, get_driver, expected, monkeypatch, caplog, part):
        """Logged once, although every step meets it."""
        driver = get_driver(max_tokens=60)
        driver.engine.core.step_log.interval = 1
        submit(driver)

        def fail(*_: object, **__: object) -> None:
            raise Planted("no statistics")

        if part == "line":
            monkeypatch.setattr("megatron_ext.engine.step_log.StepLog._write", fail)
        else:
            monkeypatch.setattr(driver.scheduler.cache, "use", fail)
        self.check(driver, expected())
        assert driver.engine.core.error_isolation.count == driver.engine.step_count
        assert sum("the log line of a step failed" in record.message for record in caplog.records) == 1

    def test_a_log_that_raises(self, get_driver, expected, broken_log, capsys):
        """The error's traceback goes to standard error instead."""
        driver = get_driver(max_tokens=60)
        driver.engine.core.step_log.interval = 1
        submit(driver)
        self.check(driver, expected())
        assert capsys.readouterr().err.count("Planted: the disk is full") == 1


STEP_PARTS = {
    "stage": "megatron_ext.mcore.context.stage_step",
    "sampling": "megatron_ext.runner.step_output.sample",
    "scoring": "megatron_ext.runner.step_output.score_rows",
    "snapshots": "megatron_ext.memory.step_states.StepStates.keep",
    "forward": "megatron_ext.mcore.context.InferenceContext.append_rotated",
}


@pytest.mark.parametrize("part", STEP_PARTS)
def test_before_the_commit_the_step_is_repeated(get_oracle, expected, monkeypatch, part):
    """KV-5, EX-8: the step has no effect, even with snapshots planned, and all requests succeed later."""
    tokens = expected()
    driver: HybridDriver = build_driver(get_oracle, max_tokens=60)
    submit(driver)
    driver.step()
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise Planted("planted")

        patch.setattr(STEP_PARTS[part], fail)
        for _ in range(2):
            with pytest.raises(Planted):
                driver.step()
            driver.engine.check()
            assert driver.states.obtainable_count == driver.states.total
    records = driver.run()
    assert {name: record.generated_tokens for name, record in records.items()} == tokens
    assert all("ERROR_TRANSIENT" in driver.events(name) for name in (0, 1))
    assert_nothing_is_left(driver)


def test_negative_control_a_commit_that_raises_is_seen(get_driver, monkeypatch):
    """A commit that failed would leave requests without their tokens, and the checks see that."""
    driver = get_driver()
    submit(driver)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_extend", at_call(Scheduler._extend, 0, Planted()))
        with pytest.raises(Planted):
            driver.engine.step_modern()
    with pytest.raises(AssertionError):
        driver.engine.check()


class TestSuspended:
    """`generate` is refused before anything is queued."""

    def test_in_words(self, get_driver):
        driver = get_driver()
        engine = driver.engine
        engine.suspend()
        with pytest.raises(Exception, match=r"suspended; call resume\(\) before generate") as raised:
            engine.generate([PROMPTS[0], PROMPTS[2]])
        assert type(raised.value).__name__ == "EngineSuspendedError"
        assert not engine.has_unfinished_requests()
        engine.resume()
        assert [record.status for record in engine.generate([PROMPTS[0]])] == [Status.COMPLETED]
        assert engine.finished_request_count == 1
        assert_nothing_is_left(driver)

    def test_a_bad_prompt_drops_the_good_ones_before_it_too(self, get_driver):
        engine = get_driver().engine
        with pytest.raises(ValueError, match="not in the vocabulary"):
            engine.generate([PROMPTS[0], [5, 1000]])
        assert len(engine.core.scheduler.queues) == 0
        assert [record.prompt_tokens for record in engine.generate([PROMPTS[2]])] == [tuple(PROMPTS[2])]
