"""JSON request bodies, within limits that are checked before objects are built; query parameters, path and sender."""

from __future__ import annotations

import json
import math
import re
import sys
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Path, Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from megatron_ext.server.api_errors import LONGEST_NAME, ApiError, ClientGone
from megatron_ext.server.openai.request_fields import IS_STRICT

if TYPE_CHECKING:
    from megatron_ext.server.openai.chat_prompt import ChatPrompt, Remember

MAX_QUOTES = 500_000
CONTAINERS, VALUES, FRACTIONS = "lists and objects", "values", "numbers with a fraction or an exponent, true and false"
# Marks outside of strings and their maximum number, by their meaning: parsing, which blocks the event loop, takes at
# most 0.1 s for each of them.
LIMITS = {
    "quotation marks of texts": (b'"', MAX_QUOTES),
    CONTAINERS: (b"[{", 100_000),
    "members of objects": (b":", 200_000),
    FRACTIONS: (b".eE", 100_000),
    VALUES: (b",", 1_050_000),  # a prompt of a million ids fits
}
MAX_LEVELS = 64  # nesting depth
_NO_MARKS = bytes(sorted(set(range(256)) - set(b"".join(marks for marks, _ in LIMITS.values()))))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_CONTAINERS = frozenset((list, dict))
SENDER_HEADER = "x-megatron-ext-router"  # replicas tell a router's requests from others by it
MAX_SENDER = 64  # characters
LONGEST_PATH_PART = 8192  # characters
ShortPath = Annotated[str, Path(max_length=LONGEST_PATH_PART)]


class JsonRoute(APIRoute):
    """Route with a JSON body, read and parsed here, before FastAPI looks at it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[object, None, Response]]:
        """Return the handler of a request, which parses the body if the route has one."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        may_be_empty = not self.body_field.field_info.is_required()

        async def limited(request: Request) -> Response:
            settings = request.app.state.serving.settings
            body = await read_body(request, settings.limits.body_bytes)
            IS_STRICT.set(settings.strict_fields)
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
    too_large = ApiError(413, f"the body is longer than the limit of {limit} bytes; see --max-body-mb")
    promised = request.headers.get("content-length", "")
    if promised.isdecimal() and int(promised) > limit:  # h11 lets at most 20 digits pass
        raise too_large
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


def parse_json(body: bytes) -> object:
    """Parse a body as JSON.

    Raises:
        ApiError: The body is empty; see also `JsonReader.read`.
    """
    if not body:
        raise ApiError(400, "the body is empty; send a JSON object")
    return JsonReader("the body").read(body)


class NotJson(ApiError):
    """400: a text is not JSON, or JSON without a meaning here: half of a surrogate pair, an infinite number, depth."""


class JsonReader:
    """Reader of the JSON texts of a request, which share its limits.

    Args:
        what: Name of the texts in errors, singular.
        param: Field that errors are about.
    """

    def __init__(self, what: str, param: str | None = None) -> None:
        self._what, self._param = what, param
        self._counts = dict.fromkeys(LIMITS, 0)

    def read(self, text: bytes) -> object:
        """Parse a text, within limits that are checked before.

        Raises:
            NotJson: It is not JSON in UTF-8, or nested too deeply for later stages.
            ApiError: Together with the texts before, it exceeds one of `LIMITS`.
        """
        self._count(text)
        try:
            content = json.loads(_decoded(text), parse_constant=_constant, parse_float=_finite)
        except json.JSONDecodeError as error:
            raise self._error(f"is not JSON: {error}", NotJson) from None
        except _BadValue as error:
            raise self._error(str(error), NotJson) from None
        except ValueError:
            message = f"has a number of more than {sys.get_int_max_str_digits()} digits; send a smaller one"
            raise self._error(message, NotJson) from None
        except RecursionError:
            raise self._too_deep() from None
        if not _has_depth(content, MAX_LEVELS):
            raise self._too_deep()
        if _SURROGATE.search(text) is not None:
            self._check_characters(content)
        return content

    def _count(self, text: bytes) -> None:
        counts = self._counts_with(text)
        if any(counts[named] > limit for named, (_, limit) in LIMITS.items()):
            counts = self._counts_with(without_strings(text))
        self._counts = counts
        for named, (_, limit) in LIMITS.items():
            if counts[named] > limit:
                raise self._error(f"has {counts[named]} {named}; the limit is {limit}")

    def _counts_with(self, text: bytes) -> dict[str, int]:
        """Return the counts so far and of a text; letters in prose are no fractions, which are values."""
        counts = {
            named: self._counts[named] + sum(text.count(mark) for mark in marks) for named, (marks, _) in LIMITS.items()
        }
        return counts | {FRACTIONS: min(counts[FRACTIONS], counts[VALUES] + counts[CONTAINERS] + 1)}

    def _check_characters(self, content: object) -> None:
        """Check that escapes of surrogates in a text are pairs; the error names the field of an object."""
        fields = content.items() if isinstance(content, dict) else [("", content)]
        for name, value in fields:
            try:
                json.dumps([name, value], ensure_ascii=False).encode()
            except UnicodeEncodeError:
                place = f" in {name}" if name.isidentifier() else ""
                error = self._error(f"has half of a surrogate pair{place}, which is no character", NotJson)
                error.param = self._param or (name if place else None)
                raise error from None

    def _too_deep(self) -> ApiError:
        return self._error(f"is nested too deeply; the limit is {MAX_LEVELS} levels", NotJson)

    def _error(self, message: str, kind: type[ApiError] = ApiError) -> ApiError:
        return kind(400, f"{self._what} {message}", param=self._param)


class _BadValue(ValueError):
    """Text or number that JSON does not have; the message follows the name of the text."""


def _decoded(text: bytes) -> str:
    try:
        decoded = text.decode()
    except UnicodeDecodeError:
        decoded = "\0"
    if decoded.startswith("\ufeff"):
        raise _BadValue("begins with a byte order mark; send UTF-8 without it")
    if "\0" in decoded[:4]:  # UTF-16 and UTF-32, too
        raise _BadValue("is not UTF-8; send JSON in UTF-8")
    return decoded


def _constant(name: str) -> object:
    raise _BadValue(f"has the value {name}, which JSON does not have; send a number or null")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _BadValue(f"has the number {digits[:30]}, which is too large; the limit is {sys.float_info.max:.4g}")
    return number


def without_strings(text: bytes) -> bytes:
    """Return the marks of `LIMITS` in a JSON text that are outside of its strings, and their quotation marks."""
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = unescaped.translate(None, _NO_MARKS).replace(b'""', b"")
    outside = b"".join(marks.split(b'"', MAX_QUOTES)[::2])  # of more texts the rest, which does not matter
    return outside.replace(b'"', b"") + b'"' * unescaped.count(b'"')


def _has_depth(content: object, limit: int) -> bool:
    """Return whether lists and objects are nested within a limit. Only containers are visited one by one."""
    level: list[Any] = [content] if type(content) in _CONTAINERS else []
    for _ in range(limit):
        parts = [outer.values() if isinstance(outer, dict) else outer for outer in level]
        level = [
            inner
            for part in parts
            if not _CONTAINERS.isdisjoint(map(type, part))
            for inner in part
            if type(inner) in _CONTAINERS
        ]
        if not level:
            break
    return not level


def only_queries(*names: str) -> Callable[[Request], Awaitable[None]]:
    """Return a route dependency that refuses query parameters of other names, instead of ignoring them."""

    async def check(request: Request) -> None:
        for name in request.query_params:
            if name not in names:
                shown = name[:LONGEST_NAME]
                raise ApiError(400, f"{shown} is not a parameter of this route", param=shown)

    return check


def sender_of(request: Request) -> str:
    """Return the router that sent a request, as its header names it; empty for a client."""
    return request.headers.get(SENDER_HEADER, "")[:MAX_SENDER]


HANDED_ON = "megatron_ext.handed_on"


@dataclass(frozen=True)
class HandedOn:
    """Parts of a request that a replica has read for a router.

    Attributes:
        tokens: Token ids of the prompts; none if they are to be tokenized.
        chat: Prompt of a conversation; None if it is to be tokenized.
        remember: Remembers answers of chats for the router; None without a router.
    """

    tokens: Sequence[array[int]] = ()
    chat: ChatPrompt | None = None
    remember: Remember | None = None


def handed_on_to(scope: Scope) -> HandedOn:
    """Return the parts of a request that a router has handed on."""
    given: HandedOn = scope.get(HANDED_ON, HandedOn())
    return given


def route_path(scope: Scope) -> str:
    """Return the path that routes are compared with: without the prefix that a proxy before the application adds."""
    path: str = scope["path"]
    prefix = scope.get("root_path", "")
    rest = path.removeprefix(prefix)
    return path if rest[:1] not in ("", "/") else rest or "/"
