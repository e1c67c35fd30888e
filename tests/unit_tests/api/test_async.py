"""PY-4: requests in any event loop, many at once; PY-5: a caller that stops waiting frees everything at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ext import (
    EngineClosed,
    RequestFailed,
    RequestParams,
    StreamPart,
    load_engine,
)
from tests.unit_tests.api.conftest import SMALL
from tests.unit_tests.support.holding import held_steps

GREEDY = RequestParams(num_tokens_to_generate=12)
LONG = RequestParams(num_tokens_to_generate=200, ignore_eos=True)
PROMPTS = ["The import statement", "A list is", [5, 6, 7, 8], "What does a generator do?"]


@pytest.fixture
def expected(engine):
    return engine.generate(PROMPTS, GREEDY)


async def parts_of(engine, prompt, params=GREEDY) -> list[StreamPart]:
    return [part async for part in engine.stream(prompt, params)]


def put_together(parts: list[StreamPart]) -> tuple[str, tuple[int, ...], str | None]:
    assert all(part.finish_reason is None for part in parts[:-1])
    assert all(part.tokens for part in parts[:-1])
    text = "".join(part.text for part in parts)
    return text, tuple(token for part in parts for token in part.tokens), parts[-1].finish_reason


def outcome(record) -> tuple[str, tuple[int, ...], str | None]:
    return record.generated_text, record.generated_tokens, record.finish_reason


def owns_nothing(engine) -> bool:
    statistics = engine.statistics()
    return (statistics.running, statistics.waiting, statistics.use.blocks_in_use) == (0, 0, 0)


class TestEqualToGenerate:
    """Tokens and texts equal those of `generate`."""

    async def test_many_at_once(self, engine, expected):
        """PY-4: sixteen at once, by both ways, mixed."""
        records = asyncio.gather(*(engine.generate_async(prompt, GREEDY) for prompt in PROMPTS * 2))
        streams = asyncio.gather(*(parts_of(engine, prompt) for prompt in PROMPTS * 2))
        assert [outcome(one) for one in await records] == [outcome(one) for one in expected] * 2
        assert [put_together(one) for one in await streams] == [outcome(one) for one in expected] * 2

    def test_in_several_loops_at_once(self, engine, expected):
        """PY-4: loops in threads of their own, beside a thread without a loop."""

        async def both(prompt):
            return await asyncio.gather(engine.generate_async(prompt, GREEDY), parts_of(engine, prompt))

        with ThreadPoolExecutor(9) as threads:
            plain = threads.submit(engine.generate, PROMPTS, GREEDY)
            found = list(threads.map(lambda i: asyncio.run(both(PROMPTS[i % 4])), range(8)))
        for index, (record, parts) in enumerate(found):
            assert outcome(record) == put_together(parts) == outcome(expected[index % 4])
        assert [outcome(one) for one in plain.result()] == [outcome(one) for one in expected]


class TestParts:
    """Parts of a stream."""

    async def test_stop_words_are_held_back(self, engine, expected):
        """PY-4: no part has a piece of a stop word; the tokens go to the one that completes it."""
        text = expected[0].generated_text
        word = text[3:9]
        params = RequestParams(num_tokens_to_generate=12, stop_words=(word,))
        (record,) = engine.generate(PROMPTS[0], params)
        parts = await parts_of(engine, PROMPTS[0], params)
        assert put_together(parts) == outcome(record) == (text[: text.index(word)], record.generated_tokens, "stop")
        seen = ""
        for part in parts:
            seen += part.text
            assert text[: text.index(word)].startswith(seen)


class TestLeaving:
    """PY-5: leaving a stream frees all its resources at once: the next request already finds nothing in use."""

    async def test_leaving_the_loop(self, engine):
        async for part in engine.stream(PROMPTS[0], LONG):
            assert part.tokens
            break
        assert owns_nothing(engine)

    async def test_closing(self, engine):
        with held_steps(engine.client):
            stream = engine.stream(PROMPTS[0], LONG)
            await anext(stream)
            assert not owns_nothing(engine)  # the control
            await stream.aclose()
            assert owns_nothing(engine)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    @pytest.mark.parametrize("way", ["generate_async", "stream"])
    async def test_cancelling_the_task(self, engine, way):
        begun = asyncio.Event()

        async def work():
            if way == "stream":
                async for _ in engine.stream(PROMPTS[0], LONG):
                    begun.set()
            else:
                begun.set()
                await engine.generate_async(PROMPTS[0], LONG)

        with held_steps(engine.client):
            task = asyncio.create_task(work())
            await begun.wait()
            while owns_nothing(engine):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert owns_nothing(engine)

    def test_a_loop_that_ends(self, engine):
        """`asyncio.run` cancels what is left."""

        async def forget():
            task = asyncio.create_task(engine.generate_async(PROMPTS[0], LONG))
            async for _ in engine.stream(PROMPTS[1], LONG):
                break
            return task

        asyncio.run(forget())
        assert owns_nothing(engine)


class TestErrors:
    """Errors are raised in the awaiting coroutine."""

    async def test_unservable_prompts(self, engine):
        """PY-4: a stream has no record to look into, so it raises."""
        prompt = [5] * engine.model_config.max_position_embeddings
        assert "cannot be served" in (await engine.generate_async(prompt)).error
        stream = engine.stream(prompt)
        with pytest.raises(RequestFailed, match="cannot be served"):
            await anext(stream)
        assert "cannot be served" in stream.record.error

    async def test_closed(self):
        with load_engine(**SMALL) as engine, held_steps(engine.client):
            stream = engine.stream(PROMPTS[0], LONG)
            await anext(stream)
            waiting = asyncio.create_task(engine.generate_async(PROMPTS[0], LONG))
            while engine.statistics().running < 2:
                await asyncio.sleep(0)
            engine.close()
            for coroutine in (waiting, _rest(stream)):
                with pytest.raises(EngineClosed, match=r"^the engine was closed before this request had ended"):
                    await coroutine
            for coroutine in (engine.generate_async("a"), parts_of(engine, "a")):
                with pytest.raises(EngineClosed, match=r"^the engine is closed"):
                    await coroutine


async def _rest(stream) -> list[StreamPart]:
    return [part async for part in stream]
