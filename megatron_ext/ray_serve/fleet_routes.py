"""Routes of an ingress that concern all replicas, and combine their answers. Needs neither Ray nor torch.

Every replica answers by the routes of its own application, so keys, hosts and origins are checked there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ext.ray_serve.forwarded import ForwardedRequest, respond
from megatron_ext.server.api_errors import FAULT, ApiError, ClientGone
from megatron_ext.server.http.body import read_body, route_path
from megatron_ext.server.openai.streaming import while_connected

PROMPT_REPLY = 5.0  # seconds that a replica has for an answer that waits for no step of its engine
LATE_REPLY = 60.0  # for the others: a reset waits for a step, a wake-up for memory
ANSWERED_BY = "megatron_ext.replica"  # key in the first message of an answer
_NO_ANSWER = 502
_PASSED_ON = (b"content-type", b"www-authenticate", b"retry-after")
_SILENT = "silent"


@dataclass(frozen=True)
class WholeAnswer:
    """Complete answer of one replica.

    Attributes:
        replica: Name of the replica.
        status: HTTP status.
        headers: Headers of the response.
        body: Body of the response.
    """

    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def json(self) -> dict[str, object]:
        """Return the body; a body that is not a JSON object is the text of one."""
        with contextlib.suppress(ValueError):
            content = json.loads(self.body)
            if isinstance(content, dict):
                return content
        return {"text": self.body.decode("utf-8", "replace")}

    def response(self) -> Response:
        """Return the answer as it is."""
        headers = {name.decode(): value.decode("latin-1") for name, value in self.headers if name in _PASSED_ON}
        return Response(self.body, self.status, headers)


async def whole_answer(app: ASGIApp, request: ForwardedRequest, replica: str) -> WholeAnswer:
    """Return the answer of a replica's application.

    Args:
        app: Application of the replica.
        request: Request that every replica gets.
        replica: Name of the replica.
    """
    status, headers, parts = 0, (), []
    async with contextlib.aclosing(respond(app, request)) as messages:
        async for message in messages:
            if message["type"] == "http.response.start":
                status, headers = message["status"], tuple(message["headers"])
            else:
                parts.append(message.get("body", b""))
    return WholeAnswer(replica, status, headers, b"".join(parts))


# By the name of the replica; a text says why a replica has not answered.
Answers = Mapping[str, WholeAnswer | str]
AskAll = Callable[[ForwardedRequest, float], Coroutine[object, None, Answers]]


def _health(answers: Answers) -> Response:
    """Return 200 if at least one replica is healthy, 503 otherwise; with the number of replicas by status."""
    statuses = Counter(
        _SILENT if isinstance(one, str) else str(one.json().get("status", one.status)) for one in answers.values()
    )
    is_healthy = any(not isinstance(one, str) and one.status == 200 for one in answers.values())
    content = {"status": "ok" if is_healthy else "failing", "replicas": statuses}
    return JSONResponse(content, 200 if is_healthy else 503)


def _load(answers: Answers) -> Response:
    """Return the sums over all replicas."""
    total: Counter[str] = Counter()
    for one in answers.values():
        if isinstance(one, WholeAnswer) and one.status == 200:
            total.update({name: value for name, value in one.json().items() if isinstance(value, int)})
    return JSONResponse(total)


def _rows(answers: Answers) -> Response:
    """Return the rows of all replicas, for the status page."""
    rows: list[object] = []
    content: dict[str, object] = {}
    for name, one in answers.items():
        if isinstance(one, str):
            rows.append({"replica": name, "status": _SILENT, "problem": one})
            continue
        content = one.json()
        found = content.pop("replicas", None)
        rows += found if isinstance(found, list) else []
    return JSONResponse(content | {"replicas": rows})


def _metrics(answers: Answers) -> Response:
    """Return the metrics of all replicas for Prometheus, with the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, one in answers.items():
        text = one.body.decode() if isinstance(one, WholeAnswer) and one.status == 200 else ""
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {"replica": replica} | sample.labels, sample.value)
    whole = generate_latest(SimpleNamespace(collect=families.values))  # it only collects
    return Response(whole, media_type="text/plain; version=0.0.4; charset=utf-8")


def _by_replica(answers: Answers, *, needs_all: bool = True) -> Response:
    """Return each replica's answer, by name.

    Args:
        answers: Answers of all replicas.
        needs_all: Whether the status is the first that is not 200; otherwise one 200 is enough.
    """
    statuses = [_NO_ANSWER if isinstance(one, str) else one.status for one in answers.values()]
    bad = [status for status in statuses if status != 200]
    is_good = not bad or (not needs_all and len(bad) < len(statuses))
    content = {
        name: {"error": {"message": one}} if isinstance(one, str) else one.json() for name, one in answers.items()
    }
    return JSONResponse({"replicas": content}, 200 if is_good else bad[0])


@dataclass(frozen=True)
class _Route:
    """Route of all replicas: how its answers become one, and how long a replica has for its own, in seconds."""

    merge: Callable[[Answers], Response]
    patience: float = LATE_REPLY


_HEALTH = _Route(_health, PROMPT_REPLY)
_ROUTES: Mapping[tuple[str, str], _Route] = {
    **dict.fromkeys([("GET", "/health"), ("HEAD", "/health"), ("GET", "/ping"), ("POST", "/ping")], _HEALTH),
    ("GET", "/load"): _Route(_load, PROMPT_REPLY),
    ("GET", "/metrics"): _Route(_metrics, PROMPT_REPLY),
    ("GET", "/replicas"): _Route(_rows, PROMPT_REPLY),
    **{("GET", path): _Route(_by_replica) for path in ("/is_sleeping", "/is_paused", "/metrics/history")},
    **{("GET", path): _Route(_by_replica) for path in ("/prefix_cache", "/prefix_cache/trace")},
    **{("POST", path): _Route(_by_replica) for path in ("/reset_prefix_cache", "/flush_cache", "/sleep", "/wake_up")},
    **{("POST", path): _Route(_by_replica) for path in ("/pause", "/resume", "/start_profile", "/stop_profile")},
    ("POST", "/update_weights_from_disk"): _Route(_by_replica),
    ("POST", "/abort"): _Route(partial(_by_replica, needs_all=False)),
}


def _merged(route: _Route, answers: Answers) -> Response:
    """Return one response; an error that all replicas report is passed on as it is.

    Raises:
        ApiError: No replica has answered.
    """
    given = [one for one in answers.values() if isinstance(one, WholeAnswer)]
    if not given and route.merge not in (_health, _rows):
        raise ApiError(503, "no replica has answered", kind=FAULT, code="no_replica")
    if given and route.merge is not _health and all(one.status == given[0].status != 200 for one in given):
        return given[0].response()
    return route.merge(answers)


class FleetRoutes:
    """ASGI application that asks all replicas where a route concerns all of them.

    Args:
        app: Application of the other routes, which one replica answers.
        ask_all: Returns the answers of all replicas that run, each of which has a number of seconds.
        max_body_bytes: Maximum size of a body.
    """

    def __init__(self, app: ASGIApp, ask_all: AskAll, max_body_bytes: int) -> None:
        self._app, self._ask_all, self._limit = app, ask_all, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on and note which replica has answered it."""
        route = _ROUTES.get((scope["method"], route_path(scope))) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, _noting_the_replica(scope, send))
            return
        try:
            body = await read_body(Request(scope, receive), self._limit)
            request = ForwardedRequest.of(scope, body)
            answers = await while_connected(receive, self._ask_all(request, route.patience))
            response = await asyncio.to_thread(_merged, route, answers)  # 3 ms a replica for metrics
        except ClientGone:
            return
        except ApiError as error:
            response = error.to_response()
        await response(scope, receive, send)


def _noting_the_replica(scope: Scope, send: Send) -> Send:
    async def noting(message: Message) -> None:
        replica = message.pop(ANSWERED_BY, None)
        if replica is not None:
            Request(scope).state.described = lambda: ("-", f" replica={replica}")
        await send(message)

    return noting
