"""Errors of the Messages API, and the middleware for its clients.

Every error of this server or of an ingress is an `ApiError`, with OpenAI's error object; on the paths of the Messages
API it gets Anthropic's envelope as it leaves.
"""

from __future__ import annotations

import json
from contextlib import suppress

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ext.server.api_errors import ApiError, ContextExceeded
from megatron_ext.server.http.body import route_path
from megatron_ext.server.log import REQUEST_ID
from megatron_ext.server.openai.streaming import event, named_event

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
THREADS_REFUSED = "thread_unsupported_request"  # code by which the SDK sends whole conversations again
_API_KEY, _AUTHORIZATION = b"x-api-key", b"authorization"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def envelope(status: int, error: dict[str, object]) -> dict[str, object]:
    """Return Anthropic's envelope of an error.

    Args:
        status: HTTP status.
        error: OpenAI's error object. Its code is kept: routers tell by it which requests to send elsewhere.
    """
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    code = {} if error.get("code") is None else {"code": error["code"]}
    named = {"type": kind, "message": error.get("message", "")} | code
    if error.get("code") == THREADS_REFUSED:
        named["details"] = {"error_code": THREADS_REFUSED, "unsupported": ["thread"]}
    return {"type": "error", "error": named, "request_id": REQUEST_ID.get()}


def error_event(error: ApiError, path: str) -> bytes:
    """Return the error that ends a stream.

    Args:
        error: Error.
        path: Path of any route, perhaps after a prefix.
    """
    return named_event(enveloped(error)) if path.endswith(MESSAGES_PATH) else event(error.to_dict())


def enveloped(error: ApiError) -> dict[str, object]:
    """Return an error in Anthropic's envelope."""
    named = error.to_dict()["error"]
    assert isinstance(named, dict), named
    return envelope(error.status, named)


def in_messages_words(error: ContextExceeded) -> ApiError:
    """Return the error of a request that does not fit, in the words that clients of the Messages API look for."""
    if error.prompt >= error.limit:
        message = f"prompt is too long: {error.prompt} tokens > {error.limit} maximum"
    else:
        sizes = f"{error.prompt} + {error.generated} > {error.limit}"
        message = f"input length and `max_tokens` exceed context limit: {sizes}, decrease input length or `max_tokens`"
    return ApiError(400, message, code=error.code)


class AnthropicMiddleware:
    """Middleware for Anthropic's clients: `x-api-key` as a bearer's key, the header `request-id`, and errors.

    Args:
        app: Next ASGI application; requests have ids already.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if _API_KEY in headers and _AUTHORIZATION not in headers:
                bearer = _AUTHORIZATION, b"Bearer " + headers[_API_KEY]
                scope["headers"] = [*scope["headers"], bearer]
            if f"{route_path(scope)}/".startswith(f"{MESSAGES_PATH}/"):
                send = _Answer(send).send
        await self._app(scope, receive, send)


class _Answer:
    """Answer of a path of the Messages API: errors are held until they are complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None  # of an error
        self._body = b""

    async def send(self, message: Message) -> None:
        """Pass a message of the answer on, or keep it as a part of an error."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message["headers"]))
            headers["request-id"] = REQUEST_ID.get()
            message = {**message, "headers": headers.raw}
            if message["status"] >= 400 and headers.get("content-type") == "application/json":
                self._head = message
                return
        elif self._head is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._head)
            return
        await self._send(message)

    async def _send_error(self, head: Message) -> None:
        content: object = None
        with suppress(ValueError):
            content = json.loads(self._body)
        if isinstance(content, dict) and content.get("type") != "error" and isinstance(content.get("error"), dict):
            self._body = json.dumps(envelope(head["status"], content["error"])).encode()
        headers = MutableHeaders(raw=list(head["headers"]))
        headers["content-length"] = str(len(self._body))
        await self._send({**head, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": self._body})
