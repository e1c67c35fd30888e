"""Prompts of generation requests, tokenized by a replica for the router and for the replica that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.ray_serve.forwarded import ReadPrompt
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.server.anthropic.chat_translation import as_chat
from megatron_ext.server.anthropic.error_envelope import MESSAGES_PATH
from megatron_ext.server.anthropic.message_fields import MessagesRequest
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.api_keys import Caller
from megatron_ext.server.http.body import parse_json
from megatron_ext.server.openai.engine_requests import chat_inputs, check_count, completion_inputs
from megatron_ext.server.openai.protocol import ChatRequest, CompletionRequest
from megatron_ext.server.openai.responses_api.continuing import conversation_of
from megatron_ext.server.openai.responses_api.create_request import ResponsesRequest

if TYPE_CHECKING:
    from megatron_ext.server.serving import Serving

_CHAT = "/v1/chat/completions"
_RESPONSES = "/v1/responses"


async def read_prompt(serving: Serving, path: str, authorization: bytes, body: bytes) -> ReadPrompt:
    """Return the prompts of a request; none of one that the route will refuse, which reports the reason.

    Args:
        serving: State of the replica.
        path: Path of the route.
        authorization: Authorization header; empty without one.
        body: Body of the request.
    """
    assert serving.keys is not None, "`__post_init__` has loaded them"
    scheme, _, key = authorization.partition(b" ")
    known = serving.keys.caller(key) if scheme.lower() == b"bearer" else None
    caller = known or serving.keys.stranger
    if not caller.can_generate:
        return ReadPrompt()
    try:
        inputs, choices = await _inputs(serving, path, parse_json(body), caller)
        tokens = tuple(packed_tokens(one.prompt_tokens) for one in inputs[::choices])
    except (ApiError, ConfigError, ValueError, TypeError, OverflowError):
        return ReadPrompt()
    first = inputs[0].params
    new_tokens = sum(one.params.num_tokens_to_generate for one in inputs)
    return ReadPrompt(tokens, first.cache_salt, new_tokens, first.enable_prefix_caching)


async def _inputs(serving: Serving, path: str, content: object, caller: Caller) -> tuple[list[RequestInputs], int]:
    """Return the inputs of a body's requests, prompt by prompt, and the number of choices of each prompt."""
    limits, defaults = serving.limits, serving.defaults
    if path in (_CHAT, _RESPONSES, MESSAGES_PATH):
        if path == _CHAT:
            chat = ChatRequest.model_validate(content)
        elif path == MESSAGES_PATH:
            chat = as_chat(MessagesRequest.model_validate(content))
        else:
            body = ResponsesRequest.model_validate(content)
            chat = body.chat_request(conversation_of(body, serving.response_store, caller.tenant).messages)
        scope, sent = caller.bind(chat.cache_salt), chat.reads_sent_ids
        prompt = (await serving.tokenize_chat(chat.messages, chat.chat_options, scope, reads_sent_ids=sent)).ids
        return chat_inputs(chat, prompt, limits, serving.chat_format, caller, defaults), chat.n or 1
    completion = CompletionRequest.model_validate(content)
    check_count(len(completion.prompts), completion.n or 1, serving.requests.capacity)
    prompts = [await serving.text_encoder.encode(one) if isinstance(one, str) else one for one in completion.prompts]
    return completion_inputs(completion, prompts, limits, caller, defaults), completion.n or 1
