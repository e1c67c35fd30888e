"""Routes of the Responses API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from megatron_ext.config import RequestParams
from megatron_ext.server.api_errors import LONGEST_NAME, ApiError
from megatron_ext.server.api_keys import Caller
from megatron_ext.server.client.request_group import RequestGroup
from megatron_ext.server.http.auth import CALLER
from megatron_ext.server.http.body import JsonRoute, ShortPath, only_queries
from megatron_ext.server.log import printable
from megatron_ext.server.openai.responses import finished
from megatron_ext.server.openai.responses_api.answer_events import Event, ResponseAnswer
from megatron_ext.server.openai.responses_api.create_request import ResponsePrompt, ResponsesRequest, conversation_of
from megatron_ext.server.openai.responses_api.response_store import tag_of
from megatron_ext.server.openai.streaming import EventStream, PieceReader, event, failure_of
from megatron_ext.server.routes.generation import json_response, prepare_chat, run_requests
from megatron_ext.server.serving import ServerDependency
from megatron_ext.server.unknown_fields import note_ignored

router = APIRouter(route_class=JsonRoute)

_MAX_WARNED = 10  # kinds in a warning
# Fields of a chat request that errors are about, and their names here.
_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
}


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request, serving: ServerDependency) -> Response:
    """Answer in a conversation, given as items or continued from a stored response."""
    tenant = _tenant(request)
    conversation = conversation_of(body, serving.response_store, tenant)
    chat = body.chat_request(conversation.messages)
    try:
        inputs, answer_format, remember = await prepare_chat(chat, request, serving)
        is_stored = serving.response_store.is_on and body.store is not False
        answer = ResponseAnswer(
            _fields(body, inputs[0].params, serving.answered_name(body.model), is_stored=is_stored),
            answer_format,
            serving.vocabulary,
            tag_of(serving.instance),
            shows_ids=bool(body.return_token_ids),
        )
        answer.thinking_token = serving.chat_format.thinking_token
        group = await run_requests(request, serving, chat, inputs, answer, remember)
    except ApiError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise

    def store() -> None:
        if is_stored:
            key = (tenant, answer.id)
            answer.response["store"] = serving.response_store.put(
                key, conversation.items, answer.response, conversation.before
            )

    pieces = PieceReader(group.handles[0], serving.decoder(inputs[0].params), splits_tokens=body.has_scores)
    events = _events(group, answer, pieces, store)
    if body.stream:
        response: Response = EventStream(group, _sent(events, answer))
    else:
        async for _ in events:  # of one piece
            pass
        response = json_response(answer.response)
    if body.left_out:
        response.headers["Warning"] = _warning(body.left_out)
    return response


@router.post("/v1/responses/input_tokens", dependencies=[Depends(only_queries())])
async def count_input_tokens(body: ResponsePrompt, request: Request, serving: ServerDependency) -> dict[str, object]:
    """Return the number of tokens of a conversation, and with `return_token_ids` the tokens."""
    serving.check_name(body.model)
    conversation = conversation_of(body, serving.response_store, _tenant(request))
    chat = await serving.chat_prompt(request, conversation.messages, body.chat_options, body.cache_salt)
    tokens = list(chat.ids)
    shown = {"prompt_token_ids": tokens} if body.return_token_ids else {}
    return {"object": "response.input_tokens", "input_tokens": len(tokens), **shown}


@router.get("/v1/responses/{response_id}", dependencies=[Depends(only_queries())])
async def retrieve_response(response_id: ShortPath, request: Request, serving: ServerDependency) -> Response:
    """Return a stored response."""
    stored = serving.response_store.get((_tenant(request), response_id), "response_id")
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", dependencies=[Depends(only_queries())])
async def delete_response(response_id: ShortPath, request: Request, serving: ServerDependency) -> dict[str, object]:
    """Delete a stored response; responses that continue it keep its turn."""
    serving.response_store.delete((_tenant(request), response_id))
    return {"id": response_id, "object": "response", "deleted": True}


def _warning(kinds: Sequence[str]) -> str:
    """Return the header that names the parts of a request that were left out, and note them once."""
    shown = ", ".join(ascii(printable(kind, LONGEST_NAME))[1:-1].replace('"', "") for kind in kinds[:_MAX_WARNED])
    for kind in kinds:
        note_ignored(f"tools and items of type {kind}")
    return f'299 - "left out, since this server does not have them: {shown}"'


def _tenant(request: Request) -> str:
    """Return the tenant of a request's key; empty without keys."""
    caller: Caller = request.scope[CALLER]
    return caller.tenant


async def _events(
    group: RequestGroup, answer: ResponseAnswer, pieces: PieceReader, store: Callable[[], None]
) -> AsyncIterator[Event]:
    """Yield the events of an answer; it is stored before the last one.

    Raises:
        ApiError: The request has failed.
    """
    for one in answer.begin():
        yield one
    while True:
        for piece in pieces.read():
            for one in answer.feed(piece):
                yield one
        if pieces.is_ended:
            break
        await group.next_update()
    last = answer.finish(finished(group.handles[0]))
    store()
    yield last


async def _sent(events: AsyncIterator[Event], answer: ResponseAnswer) -> AsyncIterator[bytes]:
    """Yield events as a client gets them; an error on the way is the last event."""
    try:
        async for one in events:
            yield _named(one)
    except Exception as error:
        yield _named(answer.fail(failure_of(error)))


def _named(one: Event) -> bytes:
    """Return a server-sent event with its type as its name."""
    return b"event: " + str(one["type"]).encode() + b"\n" + event(one)


def _fields(body: ResponsesRequest, params: RequestParams, model: str, *, is_stored: bool) -> dict[str, object]:
    """Return the fields of a response that repeat its request, with what holds for those left out."""
    given = body.model_dump(
        mode="json", include={"reasoning", "text", "metadata", "user", "safety_identifier", "prompt_cache_key"}
    )
    choice = body.tool_choice
    named = [{"type": "function", "name": name} for name in choice.names or ()]
    text = given["text"] or {}
    return {
        "model": model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": given["metadata"] or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "temperature": params.temperature,
        "top_p": params.top_p or 1.0,
        "top_logprobs": body.top_logprobs or 0,
        "tool_choice": {"type": "allowed_tools", "mode": choice.mode, "tools": named} if named else choice.mode,
        "tools": [tool.model_dump(mode="json") for tool in body.functions],
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity") or "medium"},
        "reasoning": {"effort": None, "summary": None} | (given["reasoning"] or {}),
        "truncation": "disabled",
        "background": False,
        "service_tier": "default",
        "store": is_stored,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
