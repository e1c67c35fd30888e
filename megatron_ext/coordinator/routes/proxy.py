"""Routes that one replica answers for all: they have the same model and tokenizer."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from megatron_ext.coordinator.coordination import CoordinationDependency
from megatron_ext.coordinator.replica_client import Headers
from megatron_ext.coordinator.routes.generation import passed_on
from megatron_ext.server.http.body import check_content_type, read_body
from megatron_ext.server.openai.streaming import unless_gone

router = APIRouter()


async def ask_one(request: Request, coordination: CoordinationDependency) -> Response:
    """Forward the request to one replica."""
    body = await read_body(request, coordination.settings.limits.body_bytes)
    if body:
        check_content_type(request.headers.get("content-type"))
    asking = coordination.anybody(request.method, target_of(request), headers_of(request), body)
    return passed_on(await unless_gone(request.receive, asking))


for method, path in (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model:path}"),
    ("GET", "/tokenizer_info"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
):
    router.add_api_route(path, ask_one, methods=[method], name=f"{method} {path}", response_model=None)


def target_of(request: Request) -> str:
    """Return path and query as they were sent."""
    path = request.scope.get("raw_path") or request.url.path.encode()
    query = request.scope["query_string"]
    return (path + (b"?" + query if query else b"")).decode("latin-1")


def headers_of(request: Request) -> Headers:
    """Return the headers that are forwarded to a replica."""
    return [(name, value) for name, value in request.scope["headers"] if name in (b"authorization", b"content-type")]
