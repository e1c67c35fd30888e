"""Prompts of requests, tokenized by a replica for the router and for the replica that answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.ray_serve.forwarded import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    GENERATION_PATHS,
    RESPONSES_PATH,
    TOKENIZE_PATH,
    PromptRequest,
    ReadPrompt,
)
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.server.anthropic.error_envelope import COUNT_PATH, MESSAGES_PATH
from megatron_ext.server.anthropic.message_fields import CountTokensRequest, MessagesRequest, as_chat
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.api_keys import Caller
from megatron_ext.server.http.body import parse_json
from megatron_ext.server.openai.engine_requests import chat_inputs, check_count, completion_inputs
from megatron_ext.server.openai.protocol import ChatRequest, CompletionRequest
from megatron_ext.server.openai.responses_api.create_request import ResponsePrompt, ResponsesRequest, conversation_of
from megatron_ext.server.routes.tokens import TokenizeRequest

if TYPE_CHECKING:
    from megatron_ext.server.serving import Serving


async def read_prompt(serving: Serving, request: PromptRequest) -> ReadPrompt:
    """Return the prompts of a request; none of one that the route will refuse, which reports the reason.

    Args:
        serving: State of the replica.
        request: The request.
    """
    assert serving.keys is not None, "`__post_init__` has loaded them"
    scheme, _, key = request.authorization.partition(b" ")
    known = serving.keys.caller(key) if scheme.lower() == b"bearer" else None
    caller = known or serving.keys.stranger
    if not caller.can_generate:
        return ReadPrompt()
    try:
        content = parse_json(request.body)
        if request.path == COMPLETIONS_PATH:
            return await _completion(serving, CompletionRequest.model_validate(content), caller)
        return await _chat(serving, request, content, caller)
    except (ApiError, ConfigError, ValueError, TypeError, OverflowError):
        return ReadPrompt()


async def _completion(serving: Serving, body: CompletionRequest, caller: Caller) -> ReadPrompt:
    check_count(len(body.prompts), body.n or 1, serving.requests.capacity)
    prompts = [await serving.text_encoder.encode(one) if isinstance(one, str) else one for one in body.prompts]
    inputs = completion_inputs(body, prompts, serving, caller)
    return _generating(inputs, list(map(packed_tokens, prompts)))


async def _chat(serving: Serving, request: PromptRequest, content: object, caller: Caller) -> ReadPrompt:
    """Return the prompt of a conversation; without `known`, the keys of its answers if it has some."""
    body, known = _body(serving, request.path, content, caller), request.known
    if body.messages is None:  # a text for the tokenizer
        return ReadPrompt()
    scope = caller.bind(body.cache_salt)
    conversation = await serving.conversation(
        body.messages,
        body.chat_options,
        scope,
        reads_sent_ids=body.reads_sent_ids,
        renders_answered=known is not None,
    )
    if known is None and conversation.places:
        return ReadPrompt(keys=tuple(conversation.places.values()))
    chat = await serving.read_chat(conversation, known or {})
    tokens = packed_tokens(chat.ids)
    chat = replace(chat, ids=tokens)
    if request.path not in GENERATION_PATHS or not isinstance(body, ChatRequest):
        return ReadPrompt(chat=chat)
    chat = replace(chat, marks=await serving.marked_positions(body, tokens, scope, known or {}))
    inputs = chat_inputs(body, tokens, serving, caller)
    return replace(_generating(inputs, [tokens]), chat=chat)


def _body(serving: Serving, path: str, content: object, caller: Caller) -> ChatRequest | TokenizeRequest:
    """Return a body whose conversation is the request's; a chat of the same inputs if it generates."""
    if path == TOKENIZE_PATH:
        return TokenizeRequest.model_validate(content)
    if path == CHAT_PATH:
        return ChatRequest.model_validate(content)
    if path == MESSAGES_PATH:
        return as_chat(MessagesRequest.model_validate(content))
    if path == COUNT_PATH:
        return as_chat(CountTokensRequest.model_validate(content))
    body = (ResponsesRequest if path == RESPONSES_PATH else ResponsePrompt).model_validate(content)
    return body.chat_request(conversation_of(body, serving.response_store, caller.tenant).messages)


def _generating(inputs: Sequence[RequestInputs], prompts: Sequence[array[int]]) -> ReadPrompt:
    first = inputs[0].params
    new_tokens = sum(one.params.num_tokens_to_generate for one in inputs)
    return ReadPrompt(tuple(prompts), first.cache_salt, new_tokens, first.enable_prefix_caching)
