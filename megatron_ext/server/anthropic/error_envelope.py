"""Errors of the Messages API, and the middleware for its clients."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ext.server.api_errors import ERROR_FORM, ApiError, ContextExceeded, openai_form
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


def enveloped(error: ApiError) -> dict[str, object]:
    """Return an error in Anthropic's envelope, with its code: routers tell by it which requests to send elsewhere."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    named: dict[str, object] = {"type": kind, "message": _message(error)}
    if error.code is not None:
        named["code"] = error.code
    if error.code == THREADS_REFUSED:
        named["details"] = {"error_code": THREADS_REFUSED, "unsupported": ["thread"]}
    return {"type": "error", "error": named, "request_id": REQUEST_ID.get()}


def _message(error: ApiError) -> str:
    """Return the message, of a request that does not fit in the words that clients of the Messages API look for."""
    if not isinstance(error, ContextExceeded):
        return error.message
    if error.prompt >= error.limit:
        return f"prompt is too long: {error.prompt} tokens > {error.limit} maximum"
    sizes = f"{error.prompt} + {error.generated} > {error.limit}"
    return f"input length and `max_tokens` exceed context limit: {sizes}, decrease input length or `max_tokens`"


def error_event(error: ApiError, path: str) -> bytes:
    """Return the error that ends a stream.

    Args:
        error: Error.
        path: Path of any route, perhaps after a prefix.
    """
    return named_event(enveloped(error)) if path.endswith(MESSAGES_PATH) else event(openai_form(error))


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
            is_message = f"{route_path(scope)}/".startswith(f"{MESSAGES_PATH}/")
            ERROR_FORM.set(enveloped if is_message else openai_form)
            send = _with_request_id(send) if is_message else send
        await self._app(scope, receive, send)


def _with_request_id(send: Send) -> Send:
    async def named(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=list(message["headers"]))
            headers["request-id"] = REQUEST_ID.get()
            message = {**message, "headers": headers.raw}
        await send(message)

    return named
