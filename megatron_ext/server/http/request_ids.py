"""Ids of requests that clients and proxies give in `X-Request-Id`, for all log lines of a request."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_ext.server.log import REQUEST_ID, printable

HEADER = b"x-request-id"
LONGEST_ID = 100  # characters


class RequestIds:
    """Middleware that notes the id of a request while it is answered.

    Args:
        app: Next ASGI application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; what is logged meanwhile in its tasks carries its id."""
        given = dict(scope["headers"]).get(HEADER, b"") if scope["type"] == "http" else b""
        token = REQUEST_ID.set(printable(given.decode("latin-1"), LONGEST_ID))
        try:
            await self._app(scope, receive, send)
        finally:
            REQUEST_ID.reset(token)
