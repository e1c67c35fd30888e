"""Access log: one line for each request when it ends, with counts and times, never texts; and the ids of requests.

Ids in answers and log lines are given by clients and proxies in `X-Request-Id`, or new ones.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ext.scheduling.record import Status
from megatron_ext.server.http.body import route_path
from megatron_ext.server.log import REQUEST_ID, printable
from megatron_ext.server.openai.responses import AnswerBuilder
from megatron_ext.server.request_manager import RequestGroup, RequestHandle

HEADER = b"x-request-id"
LONGEST_ID = 100  # characters
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/+=@-]")  # to be left out: an id is quoted in headers, JSON and log lines
logger = logging.getLogger(__name__)
# Polled by machines: their successes are logged at debug level only.
QUIET_PATHS = frozenset(("/", "/health", "/metrics", "/metrics/history", "/replicas"))
LONGEST_PATH = 200  # characters
CLIENT_GONE = 499  # nginx's status code for a closed connection
UNKNOWN = "-"
# Returns the id of a response, and its counts as text, each after a space. A route stores it as `described` in the
# state of its request; it is called when the request has ended.
Description = Callable[[], tuple[str, str]]


def new_request_id() -> str:
    """Return an id for a request that has none."""
    return f"req_{uuid.uuid4().hex}"


class AccessLog:
    """Middleware that gives a request its id while it is answered, gives the answer the same id, and logs the request.

    Args:
        app: Next ASGI application; it finds the id in the request's header, too, and may hand it on.
        answers: Whether to add the header to answers; False where a proxy such as Ray's does that.
        logs: Whether each request is logged.
    """

    def __init__(self, app: ASGIApp, *, answers: bool = True, logs: bool = True) -> None:
        self._app, self._answers, self._logs = app, answers, logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; log lines of its tasks carry its id meanwhile. Log it when it ends, normally or not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER, b"").decode("latin-1")
        request_id = _UNSAFE.sub("", given)[:LONGEST_ID] or new_request_id()
        field = HEADER, request_id.encode()
        scope["headers"] = [*(one for one in scope["headers"] if one[0] != HEADER), field]
        status, is_complete, started = CLIENT_GONE, False, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._answers:
                    message = {**message, "headers": [*message.get("headers", ()), field]}
            else:
                is_complete = not message.get("more_body", False)
            await send(message)

        token = REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, noting)
        finally:
            if self._logs:
                _log(scope, status if is_complete else CLIENT_GONE, time.perf_counter() - started)
            REQUEST_ID.reset(token)


def _log(scope: Scope, status: int, duration: float) -> None:
    """Log a request, which has ended."""
    is_quiet = status == 200 and route_path(scope) in QUIET_PATHS
    level = logging.DEBUG if is_quiet else logging.INFO
    if not logger.isEnabledFor(level):
        return
    description: Description | None = scope.get("state", {}).get("described")
    request_id, tokens = (UNKNOWN, "") if description is None else description()
    path = printable(scope["path"], LONGEST_PATH)
    logger.log(level, "%s %s %s %d%s duration=%.3f", request_id, scope["method"], path, status, tokens, duration)


def described(builder: AnswerBuilder, group: RequestGroup) -> tuple[str, str]:
    """Return the id of a response, and its counts as text; a prompt with several choices counts once."""
    handles, firsts = group.handles, group.handles[:: builder.choices]
    skipped = _sum(None if one.result is None else one.result.skipped_prefill_token_count for one in firsts)
    generated = _sum(_generated(one) for one in handles)
    results = [one.result for one in handles if one.result is not None]
    times = [one.ttft for one in results if one.ttft is not None]
    ttft = f"{min(times):.3f}" if times else UNKNOWN
    failures = sum(
        one.error is not None or (one.result is not None and one.result.status is Status.FAILED) for one in handles
    )
    failed = f" failed={failures}" if failures else ""
    prompt = sum(len(one.inputs.prompt_tokens) for one in firsts)
    return builder.id, f" prompt={prompt} skipped={skipped} generated={generated} ttft={ttft}{failed}"


def _generated(handle: RequestHandle) -> int | None:
    source = handle.result or handle.progress
    return None if source is None else len(source.generated_tokens)


def _sum(counts: Iterable[int | None]) -> str:
    known = list(counts)
    return UNKNOWN if None in known else str(sum(count or 0 for count in known))
