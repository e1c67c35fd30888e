"""RP-2, RP-4: two real replicas of a coordinator, called by OpenAI's client."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from benchmarks.routing.replicas import CHATS, TURNS, ask_all, memory, talk
from tests.unit_tests.support.fleet import coordinator
from tests.unit_tests.support.real_replicas import start

EVENTS = [
    word
    for kind in ("", "replay-", "states-", "states-replay-")
    for word in (f"--kv-events-{kind}endpoint", "tcp://127.0.0.1:0")
]
CLOSE = 0.02  # of all prompt tokens
SECONDS = 60.0


def client(url: str) -> openai.AsyncOpenAI:
    """A client to be closed by the caller.

    One that the garbage collector finds closes itself in a task, after asyncio's transports have released their files:
    in the loop of the test, that task stops the reading of other connections, which have the same file numbers by then.
    """
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=SECONDS)


@pytest.mark.long
async def test_two_replicas_skip_as_much_as_one_with_twice_the_memory_and_survive_each_other(tmp_path):
    """32 chats of 4 turns, one request at a time, in an order of its own each turn; beside round robin in the same run.

    Then all chats ask at once and one replica is killed: each request has an answer, which is the one that it would
    have had, or an error object.
    """
    big, one, two = (start(tmp_path, *memory(times), *EVENTS) for times in (2, 1, 1))
    try:
        for process in (big, one, two):
            process.wait()
        async with client(big.url) as api:
            alone = await talk(api)
            expected = await ask_all(api, alone.texts, TURNS - 1, 24)
        assert len(expected.answers) == CHATS
        big.kill()
        async with coordinator(one, two, policy="round_robin") as front, client(front.url) as api:
            in_turn = await talk(api)
        for replica in (one, two):
            httpx.post(f"{replica.url}/reset_prefix_cache", timeout=SECONDS).raise_for_status()
        async with coordinator(one, two) as front, client(front.url) as api:
            assert all(row["has_events"] for row in front.coordination.rows())
            together = await talk(api)
            assert together.texts == in_turn.texts == alone.texts
            assert together.share > alone.share - CLOSE
            assert together.share > in_turn.share + 5 * CLOSE
            asking = asyncio.ensure_future(ask_all(api, alone.texts, TURNS - 1, 24))
            while not front.coordination.fleet.members[two.url].calls:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            two.kill()
            seen = await asking
            await front.check_idle()
        assert not seen.lost
        assert len(seen.answers) + len(seen.errors) == CHATS
        assert len(seen.answers) >= CHATS / 2, "what was sent to the other one, and what had sent nothing yet"
        assert seen.answers.items() <= expected.answers.items()
    finally:
        for process in (big, one, two):
            process.process.kill()
