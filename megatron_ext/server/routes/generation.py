"""Routes that generate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from fastapi import APIRouter, Request
from starlette.responses import Response

from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.server.access import note_answer
from megatron_ext.server.api_errors import routing_not_recorded
from megatron_ext.server.client.request_group import RequestGroup
from megatron_ext.server.http.auth import CALLER
from megatron_ext.server.http.body import JsonRoute, sender_of
from megatron_ext.server.openai.answers import AnswerFormat
from megatron_ext.server.openai.engine_requests import chat_inputs, check_count, completion_inputs
from megatron_ext.server.openai.protocol import ChatRequest, CompletionRequest
from megatron_ext.server.openai.request_fields import GenerationRequest
from megatron_ext.server.openai.response_builders import ChatResponseBuilder, CompletionResponseBuilder
from megatron_ext.server.openai.responses import AnswerBuilder, ResponseBuilder, finished, whole
from megatron_ext.server.openai.streaming import EventStream, StreamOptions, events, source_of, while_connected
from megatron_ext.server.openai.structured_output_checks import answer_format_of, constrained_format
from megatron_ext.server.scope import handed_on_to
from megatron_ext.server.serving import ServerDependency, Serving

router = APIRouter(route_class=JsonRoute)

OnResult: TypeAlias = Callable[[RequestRecord], None]


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, serving: ServerDependency) -> Response:
    """Complete one or several prompts."""
    serving.check_name(body.model)
    choices = body.n or 1
    check_count(len(body.prompts), choices, serving.requests.capacity)
    await serving.structured_outputs.check(body.enforced_format)
    prompts: Sequence[Sequence[int]] = handed_on_to(request.scope).tokens or [
        await serving.text_encoder.encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts
    ]
    inputs = completion_inputs(body, prompts, serving.limits, request.scope[CALLER], serving.defaults)
    echoes = None
    if body.echo:
        texts = [
            prompt if isinstance(prompt, str) else await asyncio.to_thread(serving.vocabulary.detokenize, prompt)
            for prompt in body.prompts
        ]
        echoes = [text for text in texts for _ in range(choices)]
    builder = CompletionResponseBuilder(
        serving.answered_name(body.model),
        serving.vocabulary,
        choices,
        has_scores=body.logprobs is not None,
        echoes=echoes,
        shows_ids=bool(body.return_token_ids),
    )
    return await _answer(request, serving, body, inputs, builder)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request, serving: ServerDependency) -> Response:
    """Answer in a conversation."""
    inputs, answer_format, remember = await prepare_chat(body, request, serving)
    builder = ChatResponseBuilder(
        serving.answered_name(body.model),
        serving.vocabulary,
        body.n or 1,
        has_scores=bool(body.logprobs),
        shows_ids=bool(body.return_token_ids),
        answer_format=answer_format,
    )
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
    caller, sent = request.scope[CALLER], body.reads_sent_ids
    chat = await serving.chat_prompt(request, body.messages, body.chat_options, body.cache_salt, reads_sent_ids=sent)
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
    inputs = chat_inputs(
        body,
        prompt,
        serving.limits,
        serving.chat_format,
        caller,
        serving.defaults,
        response_format,
        marks,
        chat.retokenized,
    )
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
    builder.shows_versions = bool(body.return_weights_version)
    builder.shows_routing = bool(body.return_routed_experts)
    if builder.shows_routing and not serving.limits.keeps_routing:
        raise routing_not_recorded()
    group = await run_requests(request, serving, body, inputs, builder, on_result)
    if not body.stream:
        return json_response(whole(builder, [finished(handle) for handle in group.handles]))
    options = StreamOptions(serving.decoder, body.includes_usage, body.continues_usage)
    return EventStream(group, events(group, builder, options))


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
    note_answer(request.state, builder, group)
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
