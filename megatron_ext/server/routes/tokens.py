"""Routes of the tokenizer: tokenize, detokenize, and its description."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator

from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.http.body import JsonRoute, only_queries
from megatron_ext.server.http.description import ERRORS
from megatron_ext.server.openai.protocol import Message, TemplateFields
from megatron_ext.server.openai.request_fields import MAX_MESSAGES, Body, Ids, ModelName, Name, Text
from megatron_ext.server.serving import ServerDependency, Serving
from megatron_ext.text.tokenizer import TextTokenizer

router = APIRouter(route_class=JsonRoute, responses=ERRORS, dependencies=[Depends(only_queries())])


class TokenizeRequest(TemplateFields):
    """A text, or a conversation with its template options."""

    answers: ClassVar[bool] = False

    model: ModelName | None = None
    """Name of the served model, or its root."""
    prompt: Text | None = None
    """Text to tokenize; or `messages`."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """The conversation, oldest message first."""
    add_special_tokens: bool | None = None  # of a prompt: tokens that the tokenizer adds; true by default
    """Add the tokens that begin a prompt; `false` only to count tokens; true by default."""
    cache_salt: Name | None = None
    """Salt of the conversation, whose earlier answers keep their token ids."""
    return_token_strs: bool | None = None
    """Return the text of each token, too; false by default."""

    @model_validator(mode="after")
    def _has_one_text(self) -> TokenizeRequest:
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is for a prompt; the chat template decides for messages; leave it out")
        if self.prompt is not None and self.has_options:
            raise ValueError("tools and other values of the chat template are for messages; leave them out")
        return self


class DetokenizeRequest(Body):
    """Token ids."""

    model: ModelName | None = None
    """Name of the served model, or its root."""
    tokens: Ids
    """Token ids."""


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, serving: ServerDependency) -> dict[str, object]:
    """Return the ids of a text, as `/v1/completions` reads it, or of a conversation, as `/v1/chat/completions` does."""
    serving.check_name(body.model)
    tokens = await _tokens(body, request, serving)
    strings = await asyncio.to_thread(_each, serving, tokens) if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": serving.limits.max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    }


async def _tokens(body: TokenizeRequest, request: Request, serving: Serving) -> list[int]:
    if body.messages is not None:
        return list((await serving.chat_prompt(request, body)).ids)
    assert body.prompt is not None, "the body has been checked"
    tokenizer = serving.tokenizer
    if body.add_special_tokens is False and isinstance(tokenizer, TextTokenizer):
        return await serving.text_encoder.encode(body.prompt, tokenizer.tokenize_plain)
    return await serving.text_encoder.encode(body.prompt)


def _each(serving: Serving, tokens: Sequence[int]) -> list[str]:
    return [serving.vocabulary.detokenize([token], skip_special_tokens=False) for token in tokens]


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, serving: ServerDependency) -> dict[str, str]:
    """Return the text of token ids, special tokens included."""
    serving.check_name(body.model)
    limit = serving.limits.max_sequence_length
    if len(body.tokens) > limit:
        raise ApiError(400, f"tokens: {len(body.tokens)} ids; the limit is {limit}", param="tokens")
    serving.vocabulary.check_prompt(body.tokens)
    return {"prompt": await asyncio.to_thread(serving.vocabulary.detokenize, body.tokens, skip_special_tokens=False)}


@router.get("/tokenizer_info")
async def tokenizer_info(serving: ServerDependency) -> dict[str, object]:
    """Return the tokenizer's description for clients: its special tokens and its chat template."""
    tokenizer = serving.tokenizer
    info: dict[str, object] = {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": serving.limits.max_model_len,
    }
    for role, token in (("eos_token", tokenizer.eod), ("bos_token", tokenizer.bos)):
        known = token is not None and isinstance(tokenizer, TextTokenizer)
        info[role] = tokenizer.detokenize([token], skip_special_tokens=False) if known and token is not None else None
        info[f"{role}_id"] = token
    info["chat_template"] = tokenizer.chat_template if isinstance(tokenizer, TextTokenizer) else None
    return info
