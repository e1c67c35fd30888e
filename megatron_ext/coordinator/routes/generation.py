"""Routes that generate."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from megatron_ext.coordinator.coordination import Coordination, CoordinationDependency
from megatron_ext.coordinator.forwarding import Streamed
from megatron_ext.coordinator.outcome import Outcome
from megatron_ext.coordinator.prompt_tokens import checked
from megatron_ext.coordinator.replica_client import CompleteAnswer, Headers
from megatron_ext.coordinator.weights.sample_groups import GROUP_HEADER, group_name
from megatron_ext.server.access import note_description
from megatron_ext.server.anthropic.error_envelope import MESSAGES_PATH
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.http.auth import CALLER
from megatron_ext.server.http.body import check_content_type, parse_json, read_body
from megatron_ext.server.openai.streaming import EventStream, while_connected

router = APIRouter()

_PASSED_ON = (b"content-type", b"retry-after", b"www-authenticate")


@router.post("/v1/completions")
async def create_completion(request: Request, coordination: CoordinationDependency) -> Response:
    """Complete one or several prompts; the body is that of a replica's route."""
    return await _generate(request, coordination)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, coordination: CoordinationDependency) -> Response:
    """Answer in a conversation; the body is that of a replica's route."""
    return await _generate(request, coordination)


@router.post("/v1/responses")
async def create_response(request: Request, coordination: CoordinationDependency) -> Response:
    """Answer in a conversation; the body is that of a replica's route. A follow-up goes to the replica that has it."""
    return await _generate(request, coordination)


@router.post(MESSAGES_PATH)
async def create_message(request: Request, coordination: CoordinationDependency) -> Response:
    """Answer in a conversation, in the form of Anthropic's Messages API; the body is that of a replica's route."""
    return await _generate(request, coordination)


async def _generate(request: Request, coordination: Coordination) -> Response:
    body = await read_body(request, coordination.settings.limits.body_bytes)
    if body:
        check_content_type(request.headers.get("content-type"))
    content = checked(parse_json(body))
    samples = group_name(request.headers.get(GROUP_HEADER))
    outcome = Outcome()
    note_description(request.state, outcome.describe)
    authorization = dict(request.scope["headers"]).get(b"authorization")

    async def answer() -> CompleteAnswer | Streamed:
        routed = await coordination.prompts.routed(
            request.url.path, content, body, authorization, request.scope[CALLER], samples
        )
        return await coordination.forwarder.answer(routed, outcome)

    try:
        answered = await while_connected(request.receive, answer())
    except ApiError as error:
        if error.status == 429:
            coordination.metrics.rejected.inc()
        raise
    if isinstance(answered, Streamed):
        return EventStream(answered.proxied, answered.events)
    return passed_on(answered)


def passed_on(answer: CompleteAnswer) -> Response:
    """Return a replica's answer as a response of the coordinator."""
    headers: Headers = [(name, value) for name, value in answer.headers if name in _PASSED_ON]
    passed = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    return Response(answer.body, answer.status, headers=passed)
