"""Routes of Anthropic's Messages API: other words for chats."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from megatron_ext.server.anthropic.chat_translation import as_chat
from megatron_ext.server.anthropic.error_envelope import COUNT_PATH, MESSAGES_PATH, in_messages_words
from megatron_ext.server.anthropic.message_builder import MessageBuilder, message_events
from megatron_ext.server.anthropic.message_fields import CountTokensRequest, MessagesRequest, note_betas, refuse_threads
from megatron_ext.server.api_errors import ContextExceeded
from megatron_ext.server.http.body import JsonRoute
from megatron_ext.server.openai.responses import finished
from megatron_ext.server.openai.streaming import EventStream
from megatron_ext.server.routes.generation import json_response, prepare_chat, run_requests
from megatron_ext.server.serving import ServerDependency

router = APIRouter(route_class=JsonRoute)


@router.post(MESSAGES_PATH)
async def create_message(body: MessagesRequest, request: Request, serving: ServerDependency) -> Response:
    """Answer in a conversation, in the form of Anthropic's Messages API."""
    refuse_threads(body)
    note_betas(request.headers.get("anthropic-beta", ""))
    chat = as_chat(body, can_think=serving.chat_format.reasoning is not None)
    try:
        inputs, answer_format, remember = await prepare_chat(chat, request, serving)
    except ContextExceeded as error:
        raise in_messages_words(error) from None
    builder = MessageBuilder(serving.answered_name(body.model), serving.vocabulary, answer_format)
    group = await run_requests(request, serving, chat, inputs, builder, remember)
    if body.stream:
        return EventStream(group, message_events(group, builder, serving.decoder))
    return json_response(builder.whole(finished(group.handles[0])))


@router.post(COUNT_PATH)
async def count_message_tokens(body: CountTokensRequest, request: Request, serving: ServerDependency) -> dict[str, int]:
    """Return the number of prompt tokens of a request to the Messages API."""
    refuse_threads(body)
    serving.check_name(body.model)
    chat = as_chat(body)
    try:
        prompt = await serving.chat_prompt(request, chat.messages, chat.chat_options, body.cache_salt)
    except ContextExceeded as error:
        raise in_messages_words(error) from None
    return {"input_tokens": len(prompt.ids)}
