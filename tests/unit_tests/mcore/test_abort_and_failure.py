"""EX-8: resources of a request are free the moment it is aborted. A forward that raises costs nothing but time."""

from __future__ import annotations

import asyncio

import pytest

from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.ops.ssd import SSD
from megatron_ext.scheduling.record import Status
from tests.priority import TestPriority
from tests.unit_tests.support.driver import Driver, assert_equals_oracle, make_prompt

pytestmark = pytest.mark.priority(TestPriority.HIGH)

VICTIM = 1


def assert_gone(driver: Driver, free_before: int, owned: int) -> None:
    """The victim's blocks and running state slot are free although no step has run since."""
    driver.engine.check()
    assert driver.free_blocks == free_before + owned
    assert all(request.request_id != VICTIM for request in driver.scheduler.queues)


def abort(driver: Driver) -> None:
    request = driver.engine.get_request(VICTIM)
    free, owned = driver.free_blocks, len(request.block_table)
    driver.engine.abort_request(VICTIM)
    assert_gone(driver, free, owned)
    assert request.running_slot is None
    driver.engine.abort_request(VICTIM)  # until its end has been reported: nothing happens
    assert_gone(driver, free, owned)


def finish(driver: Driver, oracle: object, *, generated: int, events: list[str], prompt_length: int) -> None:
    """The next step reports the victim; the others never noticed."""
    assert VICTIM in [record.request_id for record in driver.step()["finished_request_records"]]
    record = driver.records[VICTIM]
    assert (record.status, record.finish_reason, record.error) == (Status.ABORTED, None, None)
    assert len(record.generated_tokens) == generated
    assert driver.events(VICTIM) == events
    expected = oracle.greedy(make_prompt(prompt_length), max(1, generated)).tokens[:generated]
    assert record.generated_tokens == expected
    with pytest.raises(KeyError):
        driver.engine.abort_request(VICTIM)
    driver.run()
    for request_id in set(driver.records) - {VICTIM}:
        assert_equals_oracle(driver, request_id, oracle)


@pytest.mark.parametrize("kind", ["hybrid"])
class TestAbort:
    """EX-8, where nothing is shared; test_caching_failure.py has the other stages."""

    def test_before_the_first_step(self, get_driver, get_oracle, kind):
        driver = get_driver(kind)
        future = driver.add(VICTIM, make_prompt(30))
        abort(driver)
        assert driver.engine.has_unfinished_requests()  # a step has to report it
        assert not future.done()
        finish(driver, get_oracle(kind), generated=0, events=["ADD_ENGINE"], prompt_length=30)
        assert future.result() is driver.records[VICTIM]
        assert driver.engine.step_count == 0

    def test_decoding(self, get_driver, get_oracle, kind):
        driver = get_driver(kind)
        driver.add(0, make_prompt(20))
        driver.add(VICTIM, make_prompt(30))
        driver.add(2, make_prompt(40))
        for _ in range(4):
            driver.step()
        abort(driver)
        driver.add(3, make_prompt(33))  # takes over its blocks and its running state slot
        events = ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN"]
        finish(driver, get_oracle(kind), generated=4, events=events, prompt_length=30)

    def test_evicted(self, get_driver, get_oracle, kind):
        driver = get_driver(kind, block_count=3, paused_buffer_size_gb=0)
        driver.add(0, make_prompt(20), num_tokens_to_generate=10)
        driver.add(VICTIM, make_prompt(16), num_tokens_to_generate=4)
        driver.step()
        driver.step()
        assert [request.request_id for request in driver.scheduler.queues.waiting] == [VICTIM]
        abort(driver)
        events = ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "EVICT"]
        finish(driver, get_oracle(kind), generated=1, events=events, prompt_length=16)

    def test_suspended(self, get_driver, get_oracle, kind):
        driver = get_driver(kind)
        driver.add(0, make_prompt(20))
        driver.add(VICTIM, make_prompt(30))
        driver.step()
        driver.engine.suspend()
        abort(driver)
        driver.engine.resume()
        events = ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN"]
        finish(driver, get_oracle(kind), generated=1, events=events, prompt_length=30)

    def test_after_the_end(self, get_driver, kind):
        driver = get_driver(kind)
        driver.add(VICTIM, make_prompt(5), num_tokens_to_generate=1)
        driver.run()
        with pytest.raises(KeyError):
            driver.engine.abort_request(VICTIM)
        assert driver.records[VICTIM].status is Status.COMPLETED

    def test_failed_on_arrival(self, get_driver, kind):
        """Ended, and not reported yet: aborting it changes nothing."""
        driver = get_driver(kind, block_count=2)
        driver.add(VICTIM, make_prompt(33))
        driver.engine.abort_request(VICTIM)
        driver.run()
        assert driver.records[VICTIM].status is Status.FAILED


class TestFailingForward:
    """A forward that raises: its requests go back to wait, everything is free, and they succeed later."""

    class Broken(RuntimeError):
        """Error that the forward raises."""

    def break_layer(self, monkeypatch: pytest.MonkeyPatch, name: str, layer: int) -> None:
        """Let an operator raise in its `layer`-th call of a step, when earlier layers have written their states."""
        calls = iter(range(100))
        operator = getattr(SSD, name)

        def call(*args: object, **kwargs: object) -> object:
            if next(calls) == layer:
                raise self.Broken("the device is gone")
            return operator(*args, **kwargs)

        monkeypatch.setattr(SSD, name, call)

    def driver_in_flight(self, get_driver: object) -> Driver:
        driver = get_driver(max_tokens=40, max_requests=3)
        for request_id, length in enumerate((5, 129, 64, 3)):  # decodes, mid-prefill, waits, waits
            driver.add(request_id, make_prompt(length))
        driver.step()
        driver.step()
        return driver

    @pytest.mark.parametrize(("operator", "layer"), [("prefill", 0), ("decode", 1)])
    def test_in_the_middle(self, get_driver, get_oracle, monkeypatch, operator, layer):
        driver = self.driver_in_flight(get_driver)
        lifetime, steps = driver.engine.lifetime_prefill_token_count, driver.engine.step_count
        with monkeypatch.context() as patch:
            self.break_layer(patch, operator, layer)
            with pytest.raises(self.Broken):
                driver.step()
        driver.engine.check()
        assert driver.free_blocks == driver.scheduler.blocks.total
        assert [request.request_id for request in driver.scheduler.queues.waiting] == [0, 1, 2, 3]
        assert (driver.engine.lifetime_prefill_token_count, driver.engine.step_count) == (lifetime, steps)
        driver.run()
        for request_id in range(4):
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))
        error = ["ADD_CONTEXT", "ERROR_TRANSIENT", "ADD_CONTEXT"]
        assert driver.events(0) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", *error[1:], "FINISH"]
        assert driver.events(1) == ["ADD_ENGINE", *error, "FIRST_TOKEN", "FINISH"]
        assert driver.events(3) == ["ADD_ENGINE", "ADD_CONTEXT", "FIRST_TOKEN", "FINISH"]
        payloads = [event.payload for event in driver.records[1].events if event.payload]
        assert payloads == ["Broken: the device is gone"]
        recomputed = [driver.records[i].recomputed_token_count for i in range(4)]
        assert recomputed == [5 + 1, 35 + 39, 0, 0]

    def test_a_paused_request_keeps_its_blocks_and_slot(self, get_driver, get_oracle, monkeypatch):
        driver = get_driver(block_count=3)
        driver.add(0, make_prompt(17), num_tokens_to_generate=10)
        driver.add(1, make_prompt(16), num_tokens_to_generate=4)
        driver.step()
        driver.step()
        assert len(driver.scheduler.queues.paused) == 1
        with monkeypatch.context() as patch:
            self.break_layer(patch, "decode", 1)
            with pytest.raises(self.Broken):
                driver.step()
        driver.engine.check()
        assert driver.free_blocks == 2
        driver.run()
        assert [driver.records[i].recomputed_token_count for i in (0, 1)] == [18, 0]
        for request_id in range(2):
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))


class TestRunLoop:
    """Upstream's own loop, `run_engine`, drives this engine; futures tell when a request has ended."""

    @staticmethod
    async def serve(engine: InferenceEngine, requests: object) -> object:
        """Run `requests` beside the loop, without the loop's decorator, which answers an error with `sys.exit`."""
        loop = asyncio.create_task(type(engine).run_engine.__wrapped__(engine))
        work = asyncio.create_task(requests())
        await asyncio.wait({loop, work}, return_when=asyncio.FIRST_COMPLETED)
        loop.cancel()
        await loop  # raises what ended the loop
        return await work

    async def test_requests_come_and_go(self, get_driver, get_oracle):
        driver = get_driver(max_tokens=40)

        async def requests() -> list:
            first = driver.add(0, make_prompt(63))
            records = [await first]  # the loop sleeps now
            rest = [driver.add(i, make_prompt(length)) for i, length in ((1, 129), (2, 3), (3, 3000))]
            return records + list(await asyncio.gather(*rest))

        records = await self.serve(driver.engine, requests)
        assert [record.status.name for record in records] == ["COMPLETED"] * 3 + ["FAILED"]
        driver.records = {record.request_id: record for record in records}
        for request_id in range(3):
            assert_equals_oracle(driver, request_id, get_oracle("hybrid"))

    async def test_an_abort_wakes_the_loop_up(self, get_driver):
        driver = get_driver(max_requests=1)

        async def requests() -> object:
            busy = driver.add(0, make_prompt(3), num_tokens_to_generate=400)
            waiting = driver.add(1, make_prompt(3))
            driver.engine.abort_request(1)
            aborted = await waiting
            assert not busy.done()
            driver.engine.abort_request(0)
            return [aborted, await busy]

        assert [record.status for record in await self.serve(driver.engine, requests)] == [Status.ABORTED] * 2

    @pytest.mark.parametrize("pause", [0, 20])
    async def test_suspend_and_resume(self, get_driver, get_oracle, pause):
        """The loop meets a suspended engine in the middle of its step, when it gives way to other tasks."""
        driver = get_driver(max_tokens=40)

        async def requests() -> object:
            future = driver.add(0, make_prompt(129))
            while driver.engine.get_request(0).computed_end == 0:
                await asyncio.sleep(0)
            driver.engine.suspend()
            for _ in range(pause):
                await asyncio.sleep(0)
            assert not future.done()
            driver.engine.resume()
            return await future

        driver.records[0] = await self.serve(driver.engine, requests)
        assert_equals_oracle(driver, 0, get_oracle("hybrid"))

    async def test_a_suspended_engine_waits_for_its_resume(self, get_driver, get_oracle):
        driver = get_driver()

        async def requests() -> object:
            driver.engine.suspend()
            future = driver.add(0, make_prompt(9))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not future.done()
            driver.engine.resume()
            return await future

        driver.records[0] = await self.serve(driver.engine, requests)
        assert_equals_oracle(driver, 0, get_oracle("hybrid"))
