"""Routes of completions, chats, the Responses API and Anthropic's Messages API, which is chats in other words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from megatron_ext.config import RequestParams
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.server.access import described
from megatron_ext.server.anthropic.error_envelope import COUNT_PATH, MESSAGES_PATH
from megatron_ext.server.anthropic.message_builder import MessageBuilder
from megatron_ext.server.anthropic.message_fields import (
    CountTokensRequest,
    MessagesRequest,
    as_chat,
    note_betas,
)
from megatron_ext.server.api_errors import LONGEST_NAME, ApiError
from megatron_ext.server.http.auth import CALLER
from megatron_ext.server.http.body import JsonRoute, ShortPath, handed_on_to, only_queries, sender_of
from megatron_ext.server.http.description import ERRORS, MESSAGES_ERRORS, STREAMS
from megatron_ext.server.log import printable
from megatron_ext.server.openai.engine_requests import chat_inputs, check_count, completion_inputs
from megatron_ext.server.openai.protocol import ChatRequest, CompletionRequest
from megatron_ext.server.openai.request_fields import GenerationRequest, note_ignored
from megatron_ext.server.openai.responses import (
    AnswerBuilder,
    ChatResponseBuilder,
    CompletionResponseBuilder,
    Event,
    ResponseBuilder,
    finished,
    whole,
)
from megatron_ext.server.openai.responses_api.answer_events import ResponseAnswer
from megatron_ext.server.openai.responses_api.create_request import ResponsePrompt, ResponsesRequest, conversation_of
from megatron_ext.server.openai.responses_api.response_store import tag_of
from megatron_ext.server.openai.streaming import (
    EventStream,
    events,
    named_events,
    source_of,
    typed_events,
    while_connected,
)
from megatron_ext.server.openai.structured_output_checks import answer_format_of, constrained_format
from megatron_ext.server.request_manager import RequestGroup
from megatron_ext.server.serving import ServerDependency, Serving
from megatron_ext.text.tool_calls.formats import AnswerFormat

router = APIRouter(route_class=JsonRoute, responses=ERRORS)

OnResult: TypeAlias = Callable[[RequestRecord], None]
_MAX_WARNED = 10  # kinds in a warning
# Fields of a chat request that errors are about, and their names in the Responses API.
_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text.format",
}


@router.post("/v1/completions", responses=STREAMS)
async def create_completion(body: CompletionRequest, request: Request, serving: ServerDependency) -> Response:
    """Complete one or several prompts."""
    serving.check_name(body.model)
    choices = body.n or 1
    check_count(len(body.prompts), choices, serving.requests.capacity)
    await serving.structured_outputs.check(body.enforced_format)
    prompts: Sequence[Sequence[int]] = handed_on_to(request.scope).tokens or [
        await serving.text_encoder.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts
    ]
    inputs = completion_inputs(body, prompts, serving, request.scope[CALLER])
    echoes = None
    if body.echo:
        texts = [
            prompt if isinstance(prompt, str) else await asyncio.to_thread(serving.vocabulary.detokenize, prompt)
            for prompt in body.prompts
        ]
        echoes = [text for text in texts for _ in range(choices)]
    builder = CompletionResponseBuilder(body, serving.answered_name(body.model), serving.vocabulary, echoes)
    return await _answer(request, serving, body, inputs, builder)


@router.post("/v1/chat/completions", responses=STREAMS)
async def create_chat_completion(body: ChatRequest, request: Request, serving: ServerDependency) -> Response:
    """Answer in a conversation."""
    inputs, answer_format, remember = await prepare_chat(body, request, serving)
    builder = ChatResponseBuilder(body, serving.answered_name(body.model), serving.vocabulary, answer_format)
    builder.thinking_token = serving.chat_format.thinking_token
    return await _answer(request, serving, body, inputs, builder, remember)


async def prepare_chat(
    body: ChatRequest, request: Request, serving: Serving
) -> tuple[list[RequestInputs], AnswerFormat, OnResult]:
    """Return the inputs of a conversation's requests, the format in which the model answers, and a call for records.

    Raises:
        ApiError: The request means another model, or cannot be served.
        ConfigError: The chat template refuses it, or its fields contradict each other.
    """
    serving.check_name(body.model)
    check_count(1, body.n or 1, serving.requests.capacity)
    checks = serving.structured_outputs
    await checks.check(body.enforced_format)  # before any text is tokenized: a bad schema is refused at little cost
    caller, chat = request.scope[CALLER], await serving.chat_prompt(request, body)
    handed_on, prompt = handed_on_to(request.scope), chat.ids
    answer = answer_format_of(body, prompt, serving.chat_format)
    # The grammar has the supported part of the functions' schemas; the reader of the answer gets the whole ones.
    functions = await checks.supported(answer.functions, must_call=body.tool_choice.mode == "required")
    guided = answer if functions == answer.functions else replace(answer, functions=functions)
    response_format = constrained_format(body, guided, serving.chat_format)
    if response_format != body.enforced_format:  # a grammar that has calls or thinking as well
        await checks.check(response_format)
    marks = chat.marks
    if handed_on.chat is None:
        marks = await serving.marked_positions(body, prompt, caller.bind(body.cache_salt))
    inputs = chat_inputs(body, prompt, serving, caller, response_format, marks, chat.retokenized)
    put = handed_on.remember or serving.answers.put
    return inputs, answer, partial(serving.remember, chat, answer, put)


async def _answer(
    request: Request,
    serving: Serving,
    body: GenerationRequest,
    inputs: list[RequestInputs],
    builder: ResponseBuilder,
    on_result: OnResult = lambda _: None,
) -> Response:
    """Run the requests, and return their answer, whole or as a stream."""
    if builder.shows_routing and not serving.limits.keeps_routing:
        message = "return_routed_experts: the server was started without --moe-enable-routing-replay; leave it out"
        raise ApiError(400, message, param="return_routed_experts", code="routing_not_recorded")
    group = await run_requests(request, serving, body, inputs, builder, on_result)
    if not body.stream:
        return json_response(whole(builder, [finished(handle) for handle in group.handles]))
    return EventStream(group, events(group, builder, body.stream_options))


async def run_requests(
    request: Request,
    serving: Serving,
    body: GenerationRequest,
    inputs: list[RequestInputs],
    builder: AnswerBuilder,
    on_result: OnResult,
) -> RequestGroup:
    """Run the requests to their end, or a stream's to the first token, so that earlier failures have a status.

    Args:
        request: HTTP request; the engine's requests are aborted if its client leaves.
        serving: State of the server.
        body: Body, which says whether the answer is a stream.
        inputs: Inputs of the engine's requests, prompt by prompt.
        builder: Builder of the answer; this sets which details it may show.
        on_result: Called with each record that completes.

    Raises:
        ApiError: A request has failed.
        ClientGone: The client has left.
    """
    builder.shows_cache = not serving.settings.hide_cache_counts
    if body.explain_prefix_cache:
        builder.explains = serving.explainer()
    submitting = serving.requests.submit(
        inputs, is_streamed=bool(body.stream), sender=sender_of(request), on_result=on_result
    )
    group = await while_connected(request.receive, submitting)
    request.state.described = partial(described, builder, group)
    serving.requests.groups[builder.id] = group
    try:
        await while_connected(request.receive, group.started() if body.stream else group.ended())
        for handle in group.handles:
            source_of(handle)
    except BaseException:
        group.abort()
        raise
    return group


def json_response(content: object) -> Response:
    """Return a response with a JSON body, in UTF-8."""
    return Response(json.dumps(content, ensure_ascii=False, allow_nan=False).encode(), media_type="application/json")


async def whole_answer(events: AsyncIterator[Event], answer: Event) -> Response:
    """Wait for all events, and return the whole answer that they add up to."""
    async for _ in events:
        pass
    return json_response(answer)


@router.post(MESSAGES_PATH, responses=MESSAGES_ERRORS | STREAMS)
async def create_message(body: MessagesRequest, request: Request, serving: ServerDependency) -> Response:
    """Answer in a conversation, in the form of Anthropic's Messages API."""
    note_betas(request.headers.get("anthropic-beta", ""))
    chat = as_chat(body, can_think=serving.chat_format.reasoning is not None)
    inputs, answer_format, remember = await prepare_chat(chat, request, serving)
    builder = MessageBuilder(serving.answered_name(body.model), serving.vocabulary, answer_format)
    group = await run_requests(request, serving, chat, inputs, builder, remember)
    events = typed_events(group, builder)
    if body.stream:
        return EventStream(group, named_events(events, builder))
    return await whole_answer(events, builder.message)


@router.post(COUNT_PATH, responses=MESSAGES_ERRORS)
async def count_message_tokens(body: CountTokensRequest, request: Request, serving: ServerDependency) -> dict[str, int]:
    """Return the number of prompt tokens of a request to the Messages API."""
    serving.check_name(body.model)
    prompt = await serving.chat_prompt(request, as_chat(body))
    return {"input_tokens": len(prompt.ids)}


@router.post("/v1/responses", responses=STREAMS)
async def create_response(body: ResponsesRequest, request: Request, serving: ServerDependency) -> Response:
    """Answer in a conversation, given as items or continued from a stored response."""
    tenant = request.scope[CALLER].tenant
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
        answer.thinking_token, answer.has_scores = serving.chat_format.thinking_token, body.has_scores
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

    events = typed_events(group, answer, store)
    if body.stream:
        response: Response = EventStream(group, named_events(events, answer))
    else:
        response = await whole_answer(events, answer.response)
    if body.left_out:
        response.headers["Warning"] = _warning(body.left_out)
    return response


@router.post("/v1/responses/input_tokens", dependencies=[Depends(only_queries())])
async def count_input_tokens(body: ResponsePrompt, request: Request, serving: ServerDependency) -> dict[str, object]:
    """Return the number of tokens of a conversation, and with `return_token_ids` the tokens."""
    serving.check_name(body.model)
    conversation = conversation_of(body, serving.response_store, request.scope[CALLER].tenant)
    chat = await serving.chat_prompt(request, body.chat_request(conversation.messages))
    tokens = list(chat.ids)
    shown = {"prompt_token_ids": tokens} if body.return_token_ids else {}
    return {"object": "response.input_tokens", "input_tokens": len(tokens), **shown}


@router.get("/v1/responses/{response_id}", dependencies=[Depends(only_queries())])
async def retrieve_response(response_id: ShortPath, request: Request, serving: ServerDependency) -> Response:
    """Return a stored response."""
    stored = serving.response_store.get((request.scope[CALLER].tenant, response_id), "response_id")
    return Response(stored.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}", dependencies=[Depends(only_queries())])
async def delete_response(response_id: ShortPath, request: Request, serving: ServerDependency) -> dict[str, object]:
    """Delete a stored response; responses that continue it keep its turn."""
    serving.response_store.delete((request.scope[CALLER].tenant, response_id))
    return {"id": response_id, "object": "response", "deleted": True}


def _warning(kinds: Sequence[str]) -> str:
    """Return the header that names the parts of a request that were left out, and note them once."""
    shown = ", ".join(ascii(printable(kind, LONGEST_NAME))[1:-1].replace('"', "") for kind in kinds[:_MAX_WARNED])
    for kind in kinds:
        note_ignored(f"tools and items of type {kind}")
    return f'299 - "left out, since this server does not have them: {shown}"'


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
