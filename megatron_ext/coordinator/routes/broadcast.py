"""Administrators' routes that are sent to every replica: they affect all tenants' caches."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request
from starlette.responses import Response

from megatron_ext.coordinator.coordination import Coordination, CoordinationDependency
from megatron_ext.coordinator.replica_client import CallFailed, CompleteAnswer
from megatron_ext.coordinator.routes.generation import passed_on
from megatron_ext.coordinator.routes.proxy import headers_of, target_of
from megatron_ext.server.http.body import check_content_type, read_body
from megatron_ext.server.http.combined_answers import combined
from megatron_ext.server.openai.streaming import while_connected

logger = logging.getLogger(__name__)

router = APIRouter()

_EMPTIES = ("/reset_prefix_cache", "/flush_cache", "/sleep")
_UNREACHABLE = 502


async def ask_all(request: Request, coordination: CoordinationDependency) -> Response:
    """Return each replica's answer, by URL. The status is the first that is not 200; `/abort` needs one 200."""
    body = await read_body(request, coordination.settings.limits.body_bytes)
    if body:
        check_content_type(request.headers.get("content-type"))
    path = request.url.path
    asking = coordination.broadcast(request.method, target_of(request), headers_of(request), body)
    answers = await while_connected(request.receive, asking)
    if request.method == "POST":
        logger.info("%s: %s", path, ", ".join(f"{url} {_status(answer)}" for url, answer in answers.items()))
    if path in _EMPTIES:
        _forget(coordination, answers)
    return _together(answers, needs_all=path != "/abort")


for method, path in (
    ("GET", "/prefix_cache"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/abort"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
):
    router.add_api_route(path, ask_all, methods=[method], name=f"{method} {path}", response_model=None)


def _forget(coordination: Coordination, answers: dict[str, CompleteAnswer | CallFailed]) -> None:
    for url, answer in answers.items():
        if _status(answer) == 200:
            coordination.cache_cleared(url)


def _status(answer: CompleteAnswer | CallFailed) -> int:
    return answer.status if isinstance(answer, CompleteAnswer) else _UNREACHABLE


def _together(answers: dict[str, CompleteAnswer | CallFailed], *, needs_all: bool) -> Response:
    """Combine all answers into one; an error that all replicas return is passed on unchanged."""
    statuses = [_status(answer) for answer in answers.values()]
    first = next(iter(answers.values()))
    if len(set(statuses)) == 1 and statuses[0] != 200 and isinstance(first, CompleteAnswer):
        return passed_on(first)
    found = {
        url: (_status(one), one.json() if isinstance(one, CompleteAnswer) else {"error": {"message": str(one)}})
        for url, one in answers.items()
    }
    return combined(found, needs_all=needs_all)
