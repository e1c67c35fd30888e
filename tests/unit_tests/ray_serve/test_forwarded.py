"""Requests that an ingress forwards to a replica's application, as Ray Serve does it; Ray itself is not needed."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from array import array
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from megatron_ext.ray_serve.forwarded import (
    SENDER,
    BrokenAnswerError,
    ForwardedRequest,
    IngressApp,
    PromptRequest,
    ReadPrompt,
    ReplicaLostError,
    respond,
)
from megatron_ext.server.http.body import SENDER_HEADER, HandedOn, handed_on_to
from megatron_ext.server.openai.chat_prompt import AnswerMemory
from megatron_ext.server.openai.streaming import EventStream

PROMPT = ReadPrompt((array("I", [1, 2]),), "salt", 4)
PATIENCE = 60.0  # seconds until a test gives up; nothing is measured


class Group:
    """Request group that counts aborts."""

    aborts = 0

    def abort(self) -> None:
        self.aborts += 1


class Backend:
    """Replica's application, and an ingress before it.

    `losses` has for each attempt the number of messages after which the replica is lost.
    """

    def __init__(self, *losses: int) -> None:
        self.losses = list(losses)
        self.ends_with_loss = False
        self.read: list[tuple[str, bytes, bytes]] = []
        self.attempts = 0
        self.group, self.has_begun = Group(), asyncio.Event()
        self.app = FastAPI()
        self.app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        self.app.add_api_route("/stream", self.stream, methods=["POST"])
        self.app.add_api_route("/parts", self.parts, methods=["POST"])
        self.ingress = IngressApp(self._read, self._forward, 1000, AnswerMemory(0))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.ingress), base_url="http://x")

    async def complete(self, request: Request) -> Response:
        tokens = [list(one) for one in handed_on_to(request.scope).tokens]
        body = (await request.body()).decode()
        return JSONResponse({"tokens": tokens, "body": body, "key": request.headers.get("authorization")}, 201)

    async def parts(self) -> Response:
        async def halves() -> AsyncIterator[bytes]:
            yield b"{"
            yield b"}"

        return StreamingResponse(halves(), media_type="application/json")

    async def stream(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"
            if await request.body() == b"endless":
                self.has_begun.set()
                await asyncio.Event().wait()

        await request.body()
        return EventStream(self.group, events())

    async def _read(self, request: PromptRequest) -> ReadPrompt:
        self.read.append((request.path, request.authorization, request.body))
        return PROMPT

    async def _forward(self, request: ForwardedRequest) -> AsyncIterator[Message]:
        self.attempts += 1
        left = self.losses.pop(0) if self.losses else None
        async with contextlib.aclosing(respond(self.app, request)) as messages:
            async for message in messages:
                if left == 0:
                    raise ReplicaLostError("it has ended")
                left = None if left is None else left - 1
                yield message
        if self.ends_with_loss:
            raise ReplicaLostError("it has ended after its answer")


async def test_a_request_arrives_whole_with_its_tokens():
    """RP-4: method, path, headers and body are the client's, and the prompt's tokens are handed on once."""
    backend = Backend()
    answer = await backend.http.post("/v1/completions", content=b"text", headers={"authorization": "Bearer k"})
    assert answer.status_code == 201
    assert answer.json() == {"tokens": [[1, 2]], "body": "text", "key": "Bearer k"}
    assert backend.read == [("/v1/completions", b"Bearer k", b"text")]
    assert (await backend.http.get("/v1/completions")).status_code == 405
    assert (await backend.http.get("/nothing")).status_code == 404
    assert len(backend.read) == 1, "only what generates has prompts"


async def test_tokens_are_never_the_clients():
    """RP-4: a request of which nothing was tokenized hands nothing on, whatever its headers say."""
    answer = await anext(respond(Backend().app, ForwardedRequest.of(scope("POST", "/v1/completions"), b"", None)))
    assert answer["status"] == 201
    assert ForwardedRequest.of(
        scope("POST", "/") | {"megatron_ext.handed_on": HandedOn(PROMPT.tokens)}, b""
    ).scope.keys() == {
        *("type", "method", "path", "query_string", "headers"),
    }


@pytest.mark.parametrize("losses", [(0,), (1,), (1, 0)])
async def test_a_replica_lost_before_its_answer_begins(losses: tuple[int, ...]):
    """RP-4: the request is sent again, and the client gets one answer."""
    backend = Backend(*losses)
    assert (await backend.http.post("/stream")).text == "data: 1\n\ndata: 2\n\n"
    assert backend.attempts == len(losses) + 1


async def test_every_replica_is_lost():
    """RP-4: the client gets an error after three of them."""
    backend = Backend(0, 0, 0, 0)
    answer = await backend.http.post("/v1/completions", content=b"text")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replica_lost"
    assert backend.attempts == 3


async def test_a_replica_lost_during_a_stream():
    """RP-4: the stream ends with an error that says so, and runs nowhere else."""
    backend = Backend(2)
    text = (await backend.http.post("/stream")).text
    assert text.startswith("data: 1\n\n")
    assert '"replica_lost"' in text
    assert "data: 2" not in text
    assert backend.attempts == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/stream"])
async def test_a_replica_lost_after_its_answer(path: str):
    """RP-4: a complete answer is neither repeated nor followed by an error."""
    whole = await Backend().http.post(path, content=b"text")
    backend = Backend()
    backend.ends_with_loss = True
    answer = await backend.http.post(path, content=b"text")
    assert (answer.status_code, answer.text) == (whole.status_code, whole.text)
    assert backend.attempts == 1


async def test_a_replica_lost_in_the_middle_of_an_answer():
    """RP-4: an answer that is not a stream, and of which the client has a part, is not begun a second time."""
    backend = Backend(2)
    with pytest.raises(BrokenAnswerError):
        await backend.http.post("/parts")
    assert backend.attempts == 1


async def test_a_client_that_leaves_aborts_its_request():
    """RP-4: the replica's application sees the disconnect."""
    backend = Backend()
    leaves = asyncio.Event()
    received = [{"type": "http.request", "body": b"endless", "more_body": False}]

    async def receive() -> Message:
        if received:
            return received.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    answering = asyncio.create_task(backend.ingress(scope("POST", "/stream"), receive, send))
    await asyncio.wait_for(backend.has_begun.wait(), PATIENCE)
    assert backend.group.aborts == 0
    leaves.set()
    await asyncio.wait_for(answering, PATIENCE)
    while not backend.group.aborts:
        await asyncio.sleep(0)


async def test_a_lost_ingress_aborts_its_requests():
    """RP-6: the application sees a disconnect when the reader of its answer is lost, and the answer ends."""
    backend, lost = Backend(), asyncio.Event()
    request = ForwardedRequest.of(scope("POST", "/stream"), b"endless")

    async def read() -> None:
        async for _ in respond(backend.app, request, lost):
            pass

    answering = asyncio.create_task(read())
    await asyncio.wait_for(backend.has_begun.wait(), PATIENCE)
    assert backend.group.aborts == 0
    lost.set()
    await asyncio.wait_for(answering, PATIENCE)
    assert backend.group.aborts == 1


async def test_a_body_that_is_too_long_is_not_forwarded():
    """RP-4: the ingress keeps no more of a body than the replica would take."""
    backend = Backend()
    assert (await backend.http.post("/v1/completions", content=b"x" * 1001)).status_code == 413
    assert backend.attempts == 0


def scope(method: str, path: str) -> dict[str, object]:
    return {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}


def test_a_forwarded_request_names_its_process():
    """RP-2: a client cannot pass for another router, whose requests a replica would report as others' load."""
    scope = {"type": "http", "headers": [(b"a", b"b"), (SENDER_HEADER.encode(), b"forged")]}
    headers = ForwardedRequest.of(scope, b"").scope["headers"]
    assert headers == [(b"a", b"b"), (SENDER_HEADER.encode(), SENDER.encode())]


def test_the_first_token_is_noted_once_and_in_its_process():
    """RP-2: the last listener counts, since a request may be sent again; a pickled request has none."""
    request, heard = ForwardedRequest({}, b""), []
    request.first_token.note()
    request.first_token.listen(lambda: heard.append("lost"))
    request.first_token.listen(lambda: heard.append("answers"))
    pickle.loads(pickle.dumps(request)).first_token.note()
    assert heard == []
    request.first_token.note()
    request.first_token.note()
    assert heard == ["answers"]
