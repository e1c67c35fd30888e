"""The Messages API behind an ingress of Ray Serve; Ray itself is not needed."""

from __future__ import annotations

import httpx
import pytest

from megatron_ext.config import ServerConfig
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.ray_serve.forwarded import ForwardedRequest, IngressApp, PromptRequest, ReadPrompt, ReplicaLostError
from megatron_ext.ray_serve.prompts import read_prompt
from megatron_ext.server.access import AccessLog
from megatron_ext.server.anthropic.error_envelope import AnthropicMiddleware
from megatron_ext.server.openai.chat_prompt import AnswerMemory
from megatron_ext.server.serving import Serving
from tests.unit_tests.support.messages import MESSAGES, check_envelope, contents, events_of
from tests.unit_tests.support.server import embedded_engine


@pytest.fixture(scope="module")
def serving() -> Serving:
    return Serving(LLMEngine(embedded_engine()), "embedded", ServerConfig(api_key="k"))


async def test_the_prompt_is_that_of_the_chat(serving):
    """RP-2: tokens, salt and length for the router."""
    found = []
    for path, content in (
        (MESSAGES, b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7, "cache_salt": "s"}'),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7, "cache_salt": "s"}',
        ),
    ):
        found.append(await read_prompt(serving, PromptRequest(path, b"Bearer k", content)))
    assert found[0] == found[1]
    assert found[0].tokens
    unlimited = PromptRequest(MESSAGES, b"Bearer k", b'{"messages": [{"role": "user", "content": "Hi"}]}')
    assert await read_prompt(serving, unlimited) == ReadPrompt()


class Ingress:
    """Ingress whose replicas are lost after a number of messages."""

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.read: list[tuple[str, bytes]] = []
        app = AnthropicMiddleware(IngressApp(self._read, self._forward, 1000, AnswerMemory(0)))
        transport = httpx.ASGITransport(AccessLog(app, logs=False))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://x")

    async def _read(self, request: PromptRequest) -> ReadPrompt:
        self.read.append((request.path, request.authorization))
        return ReadPrompt()

    async def _forward(self, request: ForwardedRequest):
        stream = [(b"content-type", b"text/event-stream")]
        messages = [
            {"type": "http.response.start", "status": 200, "headers": stream},
            {"type": "http.response.body", "body": b'event: ping\ndata: {"type": "ping"}\n\n', "more_body": True},
        ]
        for message in messages[: self.losses]:
            yield message
        raise ReplicaLostError("it has ended")


async def test_errors_of_the_ingress():
    """RP-4: a request that no replica has answered, one that is too long, and a stream that breaks off."""
    lost = Ingress(0)
    body = {"messages": contents("Hi"), "max_tokens": 2}
    error = check_envelope(
        await lost.http.post(MESSAGES, json=body, headers={"x-api-key": "k"}), 503, "overloaded_error"
    )
    assert error["code"] == "replica_lost"
    assert lost.read == [(MESSAGES, b"Bearer k")]
    check_envelope(await lost.http.post(MESSAGES, content=b"x" * 1001), 413, "request_too_large")
    answer = await Ingress(2).http.post(MESSAGES, json=body | {"stream": True})
    ping, last = events_of(answer.text)
    assert (ping["type"], last["type"]) == ("ping", "error")
    assert last["request_id"] == answer.headers["request-id"]
