"""Errors that a client can get, as the error object of its API with the matching status."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from itertools import takewhile

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from megatron_ext.errors import ConfigError, WeightUpdateError
from megatron_ext.server.log import RateLimitFilter, printable

logger = logging.getLogger(__name__)
logger.addFilter(RateLimitFilter())

LONGEST_MESSAGE = 1000  # characters; messages quote clients
LONGEST_NAME = 100
_QUOTED = re.compile(r"""(?<!\w)(['"])(?:\\.|(?!\1).)*(?:\1|$)""")  # as repr quotes; the end may be cut off

INVALID, UNAUTHORIZED, OVERLOADED, FAULT = (
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "server_error",
)
_METHODS = ("DELETE", "GET", "HEAD", "POST")  # of routes
REQUEST_FAILED = "request_failed"  # code of a 500 whose cause is the request: another server would fail as well


class ApiError(Exception):
    """Error response.

    Args:
        status: HTTP status.
        message: One line for the client.
        kind: OpenAI's `type`.
        param: Field that the error is about.
        code: Machine-readable code.
        headers: Headers of the response.
        logged: Line for the log in place of the message; by default the message, without its quotations of the body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = printable(" ".join(message.split()), LONGEST_MESSAGE)
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self._logged = logged

    def to_dict(self) -> dict[str, object]:
        """Return the error object in the form of the API that the request is for."""
        return ERROR_FORM.get()(self)

    def log_reason(self) -> None:
        """Log why a client gets a 4xx.

        A 400 is about a body and may quote texts of prompts, which are left out; other errors quote names.
        """
        if 400 <= self.status < 500:
            is_of_body = self.status == HTTPStatus.BAD_REQUEST
            shown = self._logged or (_QUOTED.sub("'...'", self.message) if is_of_body else self.message)
            logger.warning("%d %s: %s", self.status, self.code or self.kind, shown)

    def to_response(self) -> Response:
        """Return the response, and log its reason; ASCII, because messages quote clients, whose text may be invalid."""
        self.log_reason()
        return Response(json.dumps(self.to_dict()), self.status, headers=self.headers, media_type="application/json")


def openai_form(error: ApiError) -> dict[str, object]:
    """Return OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


ERROR_FORM: ContextVar[Callable[[ApiError], dict[str, object]]] = ContextVar("error_form", default=openai_form)
"""Form of the errors of the request that is handled."""


class ClientGone(Exception):
    """Raised when the client has closed its connection, so that no response can be sent."""


def shutting_down() -> ApiError:
    """503: no new request is accepted, and slow ones are cancelled."""
    return ApiError(503, "the server is shutting down", kind=FAULT)


def asleep() -> ApiError:
    """503: an administrator has freed the pools' memory for a while."""
    return ApiError(
        503, "the server is asleep; an administrator can wake it with POST /wake_up", kind=FAULT, code="server_asleep"
    )


def aborted() -> ApiError:
    """503: an administrator has ended the request."""
    return ApiError(503, "an administrator has ended this request", kind=FAULT, code="request_aborted")


def no_memory(what: str) -> ApiError:
    """503: not enough memory for now."""
    return ApiError(503, f"the server has no memory for {what}", kind=FAULT)


def engine_fault(error: BaseException) -> ApiError:
    """500: step after step failed."""
    return ApiError(500, f"the engine failed: {type(error).__name__}", kind=FAULT)


def unknown_model(name: str, *served: str) -> ApiError:
    """404: the client asks for a model that is not served."""
    if not name:
        message = "the path ends where a model's name belongs; GET /v1/models lists this server's"
        return ApiError(404, message, param="model", code="model_not_found")
    message = f"the model {name[:LONGEST_NAME]!r} does not exist here; this server has {', '.join(map(repr, served))}"
    return ApiError(404, message, param="model", code="model_not_found")


def no_such_response(identifier: str, param: str, *, is_on: bool) -> ApiError:
    """404: a response or an item is not stored for this client."""
    shown = printable(identifier, LONGEST_NAME)
    why = "it is unknown, too old, or has made room for others" if is_on else "this server stores no responses"
    message = f"{param}: {shown!r} is not stored: {why}; see --responses-store-mb, or send the conversation as input"
    return ApiError(404, message, param=param, code="response_not_found")


class ContextExceeded(ApiError):
    """400: prompt and output exceed the model's context. Frameworks look for the first words, and for the code.

    Args:
        excess: What exceeds the limit, as a sentence without its end.
        prompt: Tokens of the prompt; the least number if they have not been counted.
        generated: Tokens to be generated; 0 if the prompt alone is too long.
        limit: Maximum tokens of both.
        param: Field that the error is about.
    """

    def __init__(self, excess: str, prompt: int, generated: int, limit: int, param: str | None) -> None:
        code = "context_length_exceeded"
        message = f"This model's maximum context length is {limit} tokens. However, {excess} ({code})"
        super().__init__(400, message, param=param, code=code)
        self.prompt, self.generated, self.limit = prompt, generated, limit


def install_error_handlers(app: FastAPI) -> None:
    """Install exception handlers that turn every exception of a route into an error object."""

    async def answer(_: Request, error: Exception) -> Response:
        return next(convert for kind, convert in _CONVERSIONS.items() if isinstance(error, kind))(error).to_response()

    for kind in _CONVERSIONS:
        app.add_exception_handler(kind, answer)
    handlers: dict[type[Exception], Callable[..., Awaitable[Response]]] = {
        HTTPException: _http_error,
        ClientGone: _client_gone,
        MemoryError: _no_memory,
        Exception: _fault,
    }
    for other, handler in handlers.items():
        app.add_exception_handler(other, handler)


def _bad_fields(error: RequestValidationError) -> ApiError:
    message, param = describe(error.errors())
    return ApiError(400, message, param=param)


_CONVERSIONS: Mapping[type[Exception], Callable[..., ApiError]] = {
    ApiError: lambda error: error,
    ConfigError: lambda error: ApiError(400, str(error)),
    WeightUpdateError: lambda error: ApiError(503, str(error), kind=FAULT, code="weights_not_written"),
    RequestValidationError: _bad_fields,
    RecursionError: lambda _: ApiError(400, "the request is nested too deeply for this server"),
}


async def _client_gone(*_: object) -> Response:
    return Response(status_code=499)  # nginx's status code for it; it is never sent


async def _http_error(request: Request, error: HTTPException) -> Response:
    message, shown, headers = str(error.detail), printable(request.url.path, LONGEST_NAME), error.headers
    if error.status_code == 404:
        message = f"there is no route {shown}; GET /openapi.json describes the routes"
    elif error.status_code == 405:
        headers = {"Allow": ", ".join(method for method in _METHODS if _has_route(request, method))}
        message = f"{shown} does not take {request.method[:LONGEST_NAME]}, but {headers['Allow']}"
    return ApiError(error.status_code, message, headers=headers).to_response()


def _has_route(request: Request, method: str) -> bool:
    """Return whether a path has a route for a method; Starlette names the methods of its first route alone."""
    scope = {**request.scope, "method": method}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


async def _no_memory(request: Request, _: MemoryError) -> Response:
    logger.error("%s %s ran out of memory", request.method, request.url.path)
    return no_memory("this request; send less").to_response()


async def _fault(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after the answer: uvicorn logs the traceback and closes the connection, on which
    # clients would send their next request without the header.
    logger.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    close = {"Connection": "close"}
    return ApiError(500, f"the server failed: {type(error).__name__}", kind=FAULT, headers=close).to_response()


def describe(errors: Sequence[Mapping[str, object]]) -> tuple[str, str | None]:
    """Return pydantic's first error in words, and the field that it is about.

    A field of several possible types has one error for each type; these become one sentence.
    """
    first = errors[0]
    place = _place(first)
    if not place:
        return f"the body: {_sentence(first)}", None
    if first["type"] == "extra_forbidden":
        return f"{_dotted(place)} is not a known field", _dotted(place)
    field = place[0]
    if first["type"] == "value_error":  # raised by a validator of this package, with the exact place
        return f"{_dotted(place)}: {_sentence(first)}", str(field)
    of_field = [error for error in errors if _place(error)[:1] == (field,)]
    sentences = list(dict.fromkeys(_sentence(error) for error in of_field))
    same = takewhile(lambda parts: len(set(parts)) == 1, zip(*map(_place, of_field), strict=False))
    common = [parts[0] for parts in same]
    return f"{_dotted(common)}: {', or '.join(sentences)}", str(field)


def _place(error: Mapping[str, object]) -> tuple[object, ...]:
    """Return the names and indices of an error after "body"."""
    place = error["loc"]
    assert isinstance(place, tuple), place
    return place[1:]


def _sentence(error: Mapping[str, object]) -> str:
    text = str(error["msg"]).removeprefix("Value error, ").replace(" after validation", "")
    return text[:1].lower() + text[1:]


def _dotted(place: Sequence[object]) -> str:
    """Return a place as in "messages.0.content", without the types of unions that pydantic inserts."""
    names = [str(part)[:LONGEST_NAME] for part in place]
    return ".".join(name for name in names if name.isidentifier() or name.isdecimal()) or names[0]
