"""Upstream's own loop, `run_engine`, drives this engine; futures tell when a request has ended."""

from __future__ import annotations

import asyncio

import pytest

from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.scheduling.record import Status
from tests.unit_tests.support.driver import assert_equals_oracle, make_prompt


class TestRunLoop:
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
