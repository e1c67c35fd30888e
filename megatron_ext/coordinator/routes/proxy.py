"""Routes that one replica of a group answers for all of it: they have the same model and tokenizer."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request
from starlette.responses import Response

from megatron_ext.coordinator.coordination import Coordination, CoordinationDependency
from megatron_ext.coordinator.membership.member import Member
from megatron_ext.coordinator.replica_client import CompleteAnswer, Headers
from megatron_ext.coordinator.routes.generation import passed_on
from megatron_ext.server.anthropic.error_envelope import COUNT_PATH
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.http.auth import CALLER
from megatron_ext.server.http.body import check_content_type, parse_json, read_body
from megatron_ext.server.http.request_ids import HEADER
from megatron_ext.server.http.request_parts import TENANT_HEADER
from megatron_ext.server.openai.responses_api.response_ids import owner_named, owner_tag
from megatron_ext.server.openai.streaming import while_connected

router = APIRouter()

_HANDED_ON = (b"authorization", b"content-type", HEADER)


@router.get("/v1/models")
async def list_models(request: Request, coordination: CoordinationDependency) -> Response:
    """Return the models of all groups: one replica of each is asked."""
    names = coordination.fleet.groups.names
    if len(names) < 2:
        return await ask_one(request, coordination)
    found: list[object] = []
    problem: ApiError | None = None
    for name in names:
        try:
            answer = await _ask(request, coordination, name)
        except ApiError as error:
            problem = error
            continue
        if answer.status != 200:
            return passed_on(answer)
        content = answer.json()
        data = content.get("data") if isinstance(content, dict) else None
        found += data if isinstance(data, list) else []
    if not found and problem is not None:
        raise problem
    listed = {"object": "list", "data": found}
    return Response(json.dumps(listed).encode(), media_type="application/json")


router.add_api_route("/v1/models", list_models, methods=["HEAD"], include_in_schema=False)


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request, coordination: CoordinationDependency) -> Response:
    """Return a model by its name; a replica of its group is asked."""
    names = coordination.fleet.groups.names
    group = coordination.fleet.groups.resolve(model) if model in names or len(names) > 1 else None
    return passed_on(await _ask(request, coordination, group))


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, coordination: CoordinationDependency) -> Response:
    """Return the tokenizer's description; the query `model` names one of several groups."""
    asked = request.query_params.getlist("model")
    if len(asked) > 1:
        raise ApiError(400, f"model: is given {len(asked)} times; name one model", param="model")
    group = coordination.fleet.groups.resolve(asked[0] if asked else None)
    return passed_on(await _ask(request, coordination, group))


async def ask_owner(response_id: str, request: Request, coordination: CoordinationDependency) -> Response:
    """Forward the request to the replica that has stored the response; any other answers that it has not."""
    owner = coordination.fleet.owner(owner_tag(response_id))
    return passed_on(await _ask(request, coordination, None, owner=owner))


for method in ("GET", "DELETE"):
    path = "/v1/responses/{response_id}"
    router.add_api_route(path, ask_owner, methods=[method], name=f"{method} {path}", response_model=None)


async def ask_one(request: Request, coordination: CoordinationDependency) -> Response:
    """Forward the request to one replica of the group that its body means."""
    body = await read_body(request, coordination.settings.limits.body_bytes)
    group, owner = None, None
    if body:
        check_content_type(request.headers.get("content-type"))
        content = parse_json(body)
        fields = content if isinstance(content, dict) else {}
        group = coordination.fleet.groups.resolve(fields.get("model"))
        owner = coordination.fleet.owner(owner_named(fields))
    return passed_on(await _ask(request, coordination, group, body, owner))


for path in ("/tokenize", "/detokenize", "/v1/responses/input_tokens", COUNT_PATH):
    router.add_api_route(path, ask_one, methods=["POST"], name=f"POST {path}", response_model=None)


async def _ask(
    request: Request, coordination: Coordination, group: str | None, body: bytes = b"", owner: Member | None = None
) -> CompleteAnswer:
    method = "GET" if request.method == "HEAD" else request.method  # an answer without a body cannot be checked
    headers, tenant = headers_of(request), request.scope[CALLER].tenant
    headers = [*headers, (TENANT_HEADER.encode(), tenant.encode())] if tenant else headers
    asking = coordination.ask_any(method, target_of(request), headers, body, group, owner)
    return await while_connected(request.receive, asking)


def target_of(request: Request) -> str:
    """Return path and query as they were sent."""
    path = request.scope.get("raw_path") or request.url.path.encode()
    query = request.scope["query_string"]
    return (path + (b"?" + query if query else b"")).decode("latin-1")


def headers_of(request: Request) -> Headers:
    """Return the headers that are forwarded to a replica."""
    return [(name, value) for name, value in request.scope["headers"] if name in _HANDED_ON]
