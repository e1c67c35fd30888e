"""Many clients at once, clients that leave, a full queue, an engine that fails, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import httpx
import openai
import pytest

from megatron_ext.config import RequestParams
from megatron_ext.server.monitoring import cache_view
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import PATIENCE, tiny_engine

CLIENTS = 64
PREFIX = make_prompt(48, seed=5)


def prompt_of(client: int) -> list[int]:
    """A third of the clients share a prefix; each has tokens of its own."""
    return [*(PREFIX if client % 3 == 1 else []), *make_prompt(20 + client % 7, seed=client)]


def test_64_clients_a_third_of_which_leave(tiny):
    """EX-8 and EX-2: no client is refused, nothing leaks, and each of the others gets the text it would get alone."""
    prompts = [prompt_of(client) for client in range(CLIENTS)]
    alone = tiny_engine().generate(prompts, RequestParams(num_tokens_to_generate=12, enable_prefix_caching=False))
    aborted = tiny.metric("requests_total", outcome="aborted")

    async def talk(api: openai.AsyncOpenAI, client: int) -> str | None:
        leaves = client % 3 == 0
        stream = await api.completions.create(
            model="tiny", prompt=prompts[client], temperature=0, max_tokens=1900 if leaves else 12, stream=True
        )
        text = ""
        async for part in stream:
            text += part.choices[0].text
            if leaves and text.count(">") >= 2:
                await stream.close()
                return None
        return text

    async def talk_all() -> list[str | None]:
        async with tiny.async_client() as api:
            return await asyncio.gather(*(talk(api, client) for client in range(CLIENTS)))

    with tiny.held(requests=1, tokens=40):
        texts = asyncio.run(talk_all())
        tiny.check_idle()
    for client, text in enumerate(texts):
        assert text == (None if client % 3 == 0 else alone[client].generated_text), client
    assert tiny.metric("requests_total", outcome="aborted") - aborted == len(range(0, CLIENTS, 3))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_full_queue_is_429_with_retry_after(serve, stream):
    """Two run, one waits, the fourth is told when to come back; it is served later."""
    server = serve(tiny_engine(max_requests=2), max_waiting_requests=1)
    body = {"prompt": [1, 2, 3], "max_tokens": 1500, "stream": True, "temperature": 0}
    api = server.client()
    with contextlib.ExitStack() as holding, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        begin = client.build_request("POST", "/v1/completions", json=body)
        holding.enter_context(server.held())
        running = [client.send(begin, stream=True) for _ in range(2)]
        holding.enter_context(server.held(requests=2))  # even if a third one waits
        waiting = threading.Thread(target=lambda: server.http.post("/v1/completions", json=body | {"max_tokens": 1}))
        waiting.start()
        server.wait_until(lambda: server.serving.requests.living == 3)
        with pytest.raises(openai.RateLimitError) as caught:
            api.completions.create(model="tiny", prompt=[1], stream=stream)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.body["code"] == "rate_limit_exceeded"
        server.serving.requests._latencies.append(1e6)
        with pytest.raises(openai.RateLimitError) as caught:
            api.completions.create(model="tiny", prompt=[1], stream=stream)
        assert caught.value.response.headers["retry-after"] == "60", "TE-6: the wait is bounded"
        server.wait_until(lambda: server.metric("requests_waiting") == 1)
        for response in running:
            response.close()
    waiting.join(PATIENCE)
    assert server.metric("requests_rejected_total") == 2
    server.check_idle()
    assert server.client().completions.create(model="tiny", prompt=[1], max_tokens=3).usage.completion_tokens == 3
    never = server.http.post("/v1/completions", json={"prompt": [1], "n": 4})
    assert (never.status_code, never.json()["error"]["message"][:10]) == (400, "4 requests")


def test_a_client_that_leaves_before_the_engine_has_its_request_frees_its_place(serve):
    """A request that waits for the end of a step, and whose client leaves, does not count as living any more."""
    server = serve(tiny_engine(), max_waiting_requests=0)
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(PATIENCE)

    blocking = server.serving.requests.client.call(slow)
    assert begun.wait(PATIENCE)
    requests, body = server.serving.requests, json.dumps({"prompt": [1, 2], "max_tokens": 1})
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as leaving:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        server.wait_until(lambda: requests.living == 1)
    server.wait_until(lambda: requests.living == 0)
    go_on.set()
    blocking.result(PATIENCE)
    server.check_idle()
    assert server.metric("tokens_generated_total") == 0


def test_the_cache_is_described_while_a_step_takes_long(serve, monkeypatch):
    """OB-4: requests from before the step are answered; a reset in between is seen."""
    monkeypatch.setattr(cache_view, "KEPT", float("inf"))  # however slow the machine is
    server = serve(tiny_engine())
    for _ in range(2):
        server.http.post("/v1/completions", json={"prompt": PREFIX, "max_tokens": 1})
    before = server.http.get("/prefix_cache").json()
    assert before["hottest_prefixes"]
    compute = server.engine.controller.forward
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(2 * PATIENCE)
        return compute()

    server.engine.controller.forward = slow
    asking = threading.Thread(target=server.http.post, args=("/v1/completions",), kwargs={"json": {"prompt": [1, 2]}})
    asking.start()
    assert begun.wait(PATIENCE)
    for _ in range(3):
        answer = httpx.get(f"{server.url}/prefix_cache", timeout=PATIENCE).json()
        assert answer["hottest_prefixes"] == before["hottest_prefixes"]
    assert server.serving.requests.living == 1, "the step goes on"
    go_on.set()
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert server.http.get("/prefix_cache").json()["hottest_prefixes"] == []
    asking.join(PATIENCE)
    server.check_idle()
