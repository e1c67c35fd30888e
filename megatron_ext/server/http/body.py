"""Bodies of requests as JSON, within limits that are checked before anything is built of them."""

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

MAX_CONTAINERS = 100_000  # lists and objects; parsing them takes most of the time, and all of the event loop's
MAX_LEVELS = 64  # of them in each other
_STRING = re.compile(rb'"[^"]*"?')
_CONTAINERS = frozenset((list, dict))


class JsonRoute(APIRoute):
    """A route whose body, where it has one, is JSON; it is read and parsed here, before FastAPI looks at it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, None, Response]]:
        """What answers a request."""
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
    """A request whose body has been read and parsed.

    Raises:
        ApiError: See `parse_json`.
    """

    def __init__(self, request: Request, body: bytes, *, may_be_empty: bool) -> None:
        super().__init__(request.scope, request.receive)
        self._bytes = body
        self._content = None if may_be_empty and not body else parse_json(body)

    async def body(self) -> bytes:
        """As it was sent."""
        return self._bytes

    async def json(self) -> object:
        """What it says."""
        return self._content


def check_content_type(value: str | None) -> None:
    """See that a body is said to be JSON: a page of another site can send anything else without being asked.

    Raises:
        ApiError: 415.
    """
    if value is None:
        raise ApiError(415, "the body has no Content-Type; send Content-Type: application/json")
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"the body's Content-Type is {value!r}; send JSON, and Content-Type: application/json")


async def read_body(request: Request, limit: int) -> bytes:
    """All of a body.

    Args:
        request: Whose body nobody has read.
        limit: Bytes. Of a longer body no more is kept; what its headers promise is believed.

    Raises:
        ApiError: It is longer.
        ClientGone: The client left before its end.
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
    """What a body says.

    Raises:
        ApiError: It is no JSON, has too many parts, or is nested too deeply for what comes after.
    """
    if not body:
        raise ApiError(400, "the body is empty; send a JSON object")
    count = count_containers(body)
    if count > MAX_CONTAINERS:
        raise ApiError(400, f"the body has {count} lists and objects; at most {MAX_CONTAINERS} are taken")
    try:
        content = json.loads(body)
    except ValueError as error:  # no JSON, no UTF-8, a number of thousands of digits
        raise ApiError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    check_depth(content)
    return content


def count_containers(body: bytes) -> int:
    """How many lists and objects a body has; the brackets in its strings count only where there are few."""
    count = body.count(b"[") + body.count(b"{")
    if count > MAX_CONTAINERS:
        without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        outside = _STRING.sub(b"", without_escapes)
        count = outside.count(b"[") + outside.count(b"{")
    return count


def check_depth(content: object) -> None:
    """See that lists and objects are nested within `MAX_LEVELS`. Only containers are looked at one by one.

    Raises:
        ApiError: They are not.
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
    return ApiError(400, f"the body is nested too deeply; this server takes at most {MAX_LEVELS} levels")
