"""Hostile requests beside others: what one client's body does to `/health` and to another client's stream (SE-2)."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator

from benchmarks.cases import Run, case
from benchmarks.serving.streams import request, serving_process, status_of, watch

LIMIT = 250.0  # ms
CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield the name, the path and the body of each request; at most `size` bytes long."""
    lists, chat = "[" + ",".join(["[]"] * (size // 4)) + "]", {"messages": HELLO, "max_tokens": 2}
    call = {"type": "function", "function": {"name": "f", "arguments": lists}}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": lists}

    def body(path: str, name: str, **fields: object) -> tuple[str, str, bytes]:
        base = {CHAT: chat, RESPONSES: {"input": "hi", "max_output_tokens": 2}, COMPLETIONS: {"max_tokens": 1}}[path]
        return name, path, json.dumps(base | fields).encode()

    yield body(CHAT, "long name of a variable", chat_template_kwargs={"a" * size: 1})
    yield body(CHAT, "lists in arguments", messages=[{"role": "assistant", "tool_calls": [call]}, *HELLO])
    yield body(RESPONSES, "lists in arguments, responses", input=[item, *HELLO])
    name, path, content = body(CHAT, "lists in UTF-16", metadata={"a": [[]] * (size // 8)})
    yield name, path, content.decode().encode("utf-16-le")
    yield body(COMPLETIONS, "long salt", prompt="a", cache_salt="a" * size)
    yield body(CHAT, "empty texts", metadata={"a": [""] * (size // 4)})
    yield body(CHAT, "brackets in texts", metadata={"a": ["[["] * (size // 6)})
    yield body(CHAT, "members", metadata={f"{i:x}": 1 for i in range(size // 14)})
    yield body(CHAT, "fractions", metadata={"a": [1.5e-300] * (size // 10)})
    yield body(CHAT, "permitted fractions", metadata={"a": [1.5e-300] * min(49_000, size // 10)})
    yield body(CHAT, "permitted members", metadata={f"{i:x}": 1 for i in range(min(199_000, size // 14))})
    yield body(CHAT, "permitted lists", metadata={"a": [[]] * min(99_000, size // 4)})
    yield body(CHAT, "escaped emoji", metadata={"a": "\U0001f600" * (size // 12)})
    yield body(CHAT, "many messages", messages=HELLO * min(10_000, size // 40))
    yield body(COMPLETIONS, "many ids", prompt=[1] * min(1_000_000, size // 3))
    yield body(COMPLETIONS, "long text", prompt="a b " * (size // 4))
    schema = {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(min(700, size // 4000))}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(128)]
    yield body(CHAT, "large tools, a call required", tools=tools, tool_choice="required")


@case("serving", quick={"size": 4000, "watched": 0.5})
def hostile(run: Run, size: int = 7_500_000, watched: float = 4.0) -> None:
    """Longest answer of `/health`, and growth of another stream's largest gap, while each hostile request runs."""

    async def measure() -> None:
        async with serving_process({}, 16, 16) as (port, _):
            await watch(port, [], time.perf_counter() + 1)  # warms up
            alone: list[float] = []
            await watch(port, alone, time.perf_counter() + watched)
            for name, path, content in bodies(size):
                gaps: list[float] = []
                health: list[float] = []
                beside = [
                    asyncio.ensure_future(one) for one in (watch(port, gaps, float("inf")), _poll_health(port, health))
                ]
                await asyncio.sleep(watched / 4)
                begun, statuses = time.perf_counter(), Counter[int]()
                async with request(port, path, content) as reader:
                    statuses[await status_of(reader)] += 1
                    await reader.read()
                took = time.perf_counter() - begun
                await asyncio.sleep(watched / 4)
                for one in beside:
                    one.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
                slowest, growth = 1e3 * max(health), 1e3 * (max(gaps) - max(alone))
                figures = {"status": next(iter(statuses)), "ms": 1e3 * took, "health, max ms": slowest}
                bounded = slowest <= LIMIT and growth <= LIMIT
                run.row(name, {**figures, "gap's growth, ms": growth, f"both within {LIMIT:g} ms": bounded})

    asyncio.run(measure())


async def _poll_health(port: int, health: list[float]) -> None:
    while True:
        begun = time.perf_counter()
        async with request(port, "/health") as reader:
            await reader.read()
        health.append(time.perf_counter() - begun)
        await asyncio.sleep(0.01)
