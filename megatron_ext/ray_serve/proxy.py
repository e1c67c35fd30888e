"""Middleware of Ray's proxies: a request survives the ingress, or the replica, that the proxy had sent it to.

Without it a proxy drops a request whose actor ends: the client gets a 500 of Ray's own, or a stream that breaks. Ray
loads it into each proxy where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names `middlewares`. Needs no Ray.
"""

from __future__ import annotations

import logging
import os
from collections import deque

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ext.ray_serve.forwarded import ATTEMPTS, Answer, ReplicaLostError, lost

logger = logging.getLogger(__name__)

_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


def warn_if_absent() -> None:
    """Say that the proxies have no such middleware, by the environment in which Ray has started this process."""
    if os.environ.get(_VARIABLE) != f"{__name__}.middlewares":
        logger.warning(
            "requests and streams do not survive the end of an ingress: set %s=%s.middlewares where Ray starts",
            _VARIABLE,
            __name__,
        )


def middlewares() -> list[Middleware]:
    """Return the middlewares of a proxy, as Ray asks for them."""
    return [Middleware(SurvivingRequests)]


class SurvivingRequests:
    """ASGI middleware that sends a request again whose answer has not begun, and ends a stream that breaks.

    Args:
        app: Application of the proxy, which returns before an answer is complete if the actor that gave it is lost.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, answer = _Body(receive), Answer(send, scope["path"])

        async def pass_on(message: Message) -> None:
            await answer.send(message)
            if answer.has_begun:
                body.forget()

        headers = scope["headers"]
        for attempt in range(1, ATTEMPTS + 1):
            own = {**scope, "headers": headers}  # the proxy changes paths in it
            await self._app(own, body.receive_all(), pass_on)
            headers = own["headers"]  # with the id that the first attempt has given it
            if answer.is_complete or body.is_gone:
                return
            try:
                await answer.lose(ReplicaLostError("the connection to it has ended"))
                return
            except ReplicaLostError as error:
                if attempt == ATTEMPTS:
                    await lost(error).to_response()(scope, receive, send)


class _Body:
    """Body of a request, which can be received again from its start until it is forgotten.

    Attributes:
        is_gone: Whether the client has left.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._parts: list[Message] | None = []
        self.is_gone = False

    def forget(self) -> None:
        """Keep no parts any more."""
        self._parts = None

    def receive_all(self) -> Receive:
        """Return a function that receives from the start on."""
        kept = deque(self._parts or ())

        async def receive() -> Message:
            if kept:
                return kept.popleft()
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_gone = True
            elif self._parts is not None:
                self._parts.append(message)
            return message

        return receive
