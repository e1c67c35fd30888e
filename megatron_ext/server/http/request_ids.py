"""Ids of requests in answers and log lines: given by clients and proxies in `X-Request-Id`, or new ones."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ext.server.log import REQUEST_ID

HEADER = b"x-request-id"
LONGEST_ID = 100  # characters
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")  # to be left out: an id is quoted in headers, JSON and log lines


def new_request_id() -> str:
    """Return an id for a request that has none."""
    return f"req_{uuid.uuid4().hex}"


def safe_request_id(given: str) -> str:
    """Return the safe characters of a given id, cut at `LONGEST_ID`; a new id if none is left."""
    return _UNSAFE.sub("", given)[:LONGEST_ID] or new_request_id()


class RequestIds:
    """Middleware that gives a request its id while it is answered, and the answer the same id.

    Args:
        app: Next ASGI application; it finds the id in the request's header, too, and may hand it on.
        answers: Whether to add the header to answers; False where a proxy such as Ray's does that.
    """

    def __init__(self, app: ASGIApp, *, answers: bool = True) -> None:
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; log lines of its tasks carry its id meanwhile."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = safe_request_id(dict(scope["headers"]).get(HEADER, b"").decode("latin-1"))
        field = HEADER, request_id.encode()
        scope["headers"] = [*(one for one in scope["headers"] if one[0] != HEADER), field]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), field]}
            await send(message)

        token = REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, send_with_id if self._answers else send)
        finally:
            REQUEST_ID.reset(token)
