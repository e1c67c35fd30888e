"""JSON request bodies, within limits that are checked before objects are built."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from megatron_ext.server.api_errors import ApiError, ClientGone, body_too_large

MAX_CONTAINERS = 100_000  # lists and objects; they dominate the time of parsing, which blocks the event loop
MAX_LEVELS = 64  # nesting depth
_STRING = re.compile(rb'"[^"]*"?')
_CONTAINERS = frozenset((list, dict))


class JsonRoute(APIRoute):
    """Route with a JSON body, read and parsed here, before FastAPI looks at it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, None, Response]]:
        """Return the handler of a request, which parses the body if the route has one."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        may_be_empty = not self.body_field.field_info.is_required()

        async def limited(request: Request) -> Response:
            body = await read_body(request, request.app.state.serving.settings.limits.body_bytes)
            if body:
                check_content_type(request.headers.get("content-type"))
            return await handle(_Parsed(request, body, may_be_empty=may_be_empty))

        return limited


class _Parsed(Request):
    """Request whose body has been read and parsed.

    Raises:
        ApiError: See `parse_json`.
    """

    def __init__(self, request: Request, body: bytes, *, may_be_empty: bool) -> None:
        super().__init__(request.scope, request.receive)
        self._bytes = body
        self._content = None if may_be_empty and not body else parse_json(body)

    async def body(self) -> bytes:
        """Return the raw body."""
        return self._bytes

    async def json(self) -> object:
        """Return the parsed body."""
        return self._content


def check_content_type(value: str | None) -> None:
    """Check that a body is declared as JSON: a page of another site can send other types without a CORS preflight.

    Raises:
        ApiError: 415.
    """
    if value is None:
        raise ApiError(415, "the body has no Content-Type; send Content-Type: application/json")
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"the body's Content-Type is {value!r}; send JSON, and Content-Type: application/json")


async def read_body(request: Request, limit: int) -> bytes:
    """Read a whole body.

    Args:
        request: Request whose body is still unread.
        limit: Maximum size in bytes. A longer body is dropped at the limit, or at once if Content-Length exceeds it.

    Raises:
        ApiError: The body is longer.
        ClientGone: The client left before the end.
    """
    promised = request.headers.get("content-length", "")
    if promised.isdecimal() and int(promised) > limit:  # h11 lets at most 20 digits pass
        raise body_too_large(limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise body_too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


def parse_json(body: bytes) -> object:
    """Parse a body as JSON.

    Raises:
        ApiError: The body is not JSON, has too many lists and objects, or is nested too deeply for later stages.
    """
    if not body:
        raise ApiError(400, "the body is empty; send a JSON object")
    count = count_containers(body)
    if count > MAX_CONTAINERS:
        raise ApiError(400, f"the body has {count} lists and objects; the limit is {MAX_CONTAINERS}")
    try:
        content = json.loads(body)
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ApiError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    check_depth(content)
    return content


def count_containers(body: bytes) -> int:
    """Count the lists and objects of a body; brackets in strings are excluded only if the limit is exceeded."""
    count = body.count(b"[") + body.count(b"{")
    if count > MAX_CONTAINERS:
        without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        outside = _STRING.sub(b"", without_escapes)
        count = outside.count(b"[") + outside.count(b"{")
    return count


def check_depth(content: object) -> None:
    """Check that lists and objects are nested within `MAX_LEVELS`. Only containers are visited one by one.

    Raises:
        ApiError: They are nested more deeply.
    """
    level: list[Any] = [content] if type(content) in _CONTAINERS else []
    for _ in range(MAX_LEVELS):
        parts = [outer.values() if isinstance(outer, dict) else outer for outer in level]
        level = [
            inner
            for part in parts
            if not _CONTAINERS.isdisjoint(map(type, part))
            for inner in part
            if type(inner) in _CONTAINERS
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested too deeply; the limit is {MAX_LEVELS} levels")
