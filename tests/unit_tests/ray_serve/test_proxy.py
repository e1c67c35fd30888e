"""Middleware of Ray's proxies, around a stand-in for a proxy that loses the actors that answer; Ray is not needed."""

from __future__ import annotations

import json

import pytest
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from megatron_ext.ray_serve.forwarded import BrokenAnswerError
from megatron_ext.ray_serve.proxy import middlewares

PARTS = (b"half ", b"and half")
EVENTS = (b"data: 1\n\n", b"data: 2\n\n")


class Proxy:
    """A proxy that echoes the body, or sends `EVENTS`, and a client of it.

    `losses` has for each attempt the number of messages after which its actor is lost.
    """

    def __init__(self, *losses: int, kind: bytes = b"application/json") -> None:
        self.losses, self.kind = list(losses), kind
        self.paths: list[str] = []
        self.ids: list[str] = []
        self.sent: list[Message] = []
        self.has_left = False
        (middleware,) = middlewares()
        self.app = middleware.cls(self, *middleware.args, **middleware.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] += "/app"
        self.paths.append(scope["root_path"])
        headers = MutableHeaders(scope=scope)
        headers.setdefault("x-request-id", f"id{len(self.ids)}")
        self.ids.append(headers["x-request-id"])
        body, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
        parts = (b"[", body, b"]") if self.kind == b"application/json" else EVENTS
        left = self.losses.pop(0) if self.losses else 99
        for message in (
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", self.kind)]},
            *({"type": "http.response.body", "body": part, "more_body": part is not parts[-1]} for part in parts),
        ):
            if not left:
                return
            left -= 1
            await send(message)

    async def ask(self) -> bytes:
        """Send a request in two parts, and return the body of the one answer."""
        arriving = [
            {"type": "http.request", "body": part, "more_body": part is not PARTS[-1] or self.has_left}
            for part in PARTS
        ]

        async def receive() -> Message:
            return arriving.pop(0) if arriving else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append(message)

        await self.app({"type": "http", "path": "/v1/completions", "root_path": "", "headers": []}, receive, send)
        assert [one["type"] for one in self.sent].count("http.response.start") <= 1
        return b"".join(one.get("body", b"") for one in self.sent)


@pytest.mark.parametrize("losses", [(), (0,), (1,), (1, 0)])
async def test_a_request_whose_answer_has_not_begun_is_sent_again(losses: tuple[int, ...]):
    """RP-6: with its whole body, its path and the id that it was given; the client gets one answer."""
    proxy = Proxy(*losses)
    assert await proxy.ask() == b"[half and half]"
    assert proxy.sent[0]["status"] == 200
    assert proxy.paths == ["/app"] * (len(losses) + 1)
    assert set(proxy.ids) == {"id0"}


async def test_every_attempt_is_lost():
    """RP-6: the client gets an error after three of them."""
    proxy = Proxy(0, 1, 0, 0)
    assert json.loads(await proxy.ask())["error"]["code"] == "replica_lost"
    assert proxy.sent[0]["status"] == 503
    assert len(proxy.paths) == 3


async def test_a_stream_that_breaks_ends_with_an_error():
    """RP-6: its last event says so, and it runs nowhere else."""
    proxy = Proxy(2, kind=b"text/event-stream")
    first, error = (await proxy.ask()).split(b"\n\n", 1)
    assert first == b"data: 1"
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert proxy.sent[-1]["more_body"] is False
    assert len(proxy.paths) == 1


async def test_another_answer_that_breaks_is_not_completed():
    """RP-6: the server closes the connection, and the request runs nowhere else."""
    proxy = Proxy(2)
    with pytest.raises(BrokenAnswerError):
        await proxy.ask()
    assert proxy.sent[-1]["more_body"] is True
    assert len(proxy.paths) == 1


async def test_a_request_whose_client_has_left_is_not_sent_again():
    """RP-6: an answer that never begins has no reader any more."""
    proxy = Proxy()
    proxy.has_left = True
    assert await proxy.ask() == b""
    assert len(proxy.paths) == 1
