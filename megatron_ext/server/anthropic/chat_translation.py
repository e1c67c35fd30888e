"""Requests of the Messages API as chat requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from megatron_ext.server.anthropic.message_fields import (
    Block,
    CountTokensRequest,
    Fields,
    Mark,
    MessageParam,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from megatron_ext.server.api_errors import ApiError, describe
from megatron_ext.server.openai.protocol import ChatRequest
from megatron_ext.server.unknown_fields import note_ignored
from megatron_ext.text.chat_template import ENABLE_THINKING

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# A block of Claude Code's system prompt that differs from request to request: as text it would hide the cached prefix.
_BILLING = "x-anthropic-billing-header:"


def as_chat(body: CountTokensRequest, *, can_think: bool = True) -> ChatRequest:
    """Return the chat request that is answered in place of a request of the Messages API.

    Args:
        body: Request.
        can_think: Whether the model's chat template has thinking, which a budget limits.

    Raises:
        ApiError: 400: values contradict each other.
    """
    fields = _prompt(body)
    if isinstance(body, MessagesRequest):
        fields |= _generation(body, can_think=can_think)
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        message, param = describe([{**one, "loc": ("body", *one["loc"])} for one in error.errors()])
        raise ApiError(400, message, param=param) from None


def _prompt(body: CountTokensRequest) -> Fields:
    """Return the fields that make the prompt."""
    messages = [turn for message in body.messages for turn in _turns(message)]
    system = _system(body.system)
    if body.cache_control is not None:
        messages[-1] |= {"cache_control": body.cache_control}
    fields: Fields = {"model": body.model, "messages": system + messages, "tools": _tools(body)}
    if body.messages[-1].role == "assistant":  # the answer continues it
        if any(isinstance(block, ToolUseBlock) for block in body.messages[-1].content):
            raise ApiError(400, "messages: the last one has a tool_use block, and no tool_result follows")
        fields |= {"continue_final_message": True}
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        variables.setdefault(ENABLE_THINKING, body.thinking.type != "disabled")
    fields["chat_template_kwargs"] = variables or None
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    return fields


def _generation(body: MessagesRequest, *, can_think: bool) -> Fields:
    """Return the fields that only an answer needs."""
    same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt", "enable_prefix_caching", "seed")
    fields: Fields = {name: getattr(body, name) for name in same}
    fields["stop"] = body.stop_sequences or None
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = _CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.thinking is not None and body.thinking.type == "enabled":
        if can_think:
            fields["thinking_budget_tokens"] = body.thinking.budget_tokens
        else:
            note_ignored("thinking, which the model's chat template does not have")
    form = None if body.output_config is None else body.output_config.format
    if form is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.json_schema}}
    return fields


def _system(system: Sequence[TextBlock] | None) -> list[Fields]:
    kept = [block for block in system or () if not block.text.startswith(_BILLING)]
    if len(kept) < len(system or ()):
        note_ignored(f"system text that begins with {_BILLING}")
    return [{"role": "system", "content": _parts(kept)}] if kept else []


def _tools(body: CountTokensRequest) -> list[Fields] | None:
    if not body.tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
            "cache_control": tool.cache_control,
        }
        for tool in body.tools
    ]


def _turns(message: MessageParam) -> Iterator[Fields]:
    """Yield a message as chat messages: each result of a tool is one of its own, in the order of the blocks."""
    if message.role == "assistant":
        yield _answer(message.content)
        return
    for is_result, blocks in itertools.groupby(message.content, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            yield from (_result(block) for block in blocks if isinstance(block, ToolResultBlock))
        else:
            yield {"role": message.role, "content": _parts(list(blocks))}
    if not message.content:
        yield {"role": message.role, "content": ""}


def _answer(blocks: Sequence[Block]) -> Fields:
    """Return an earlier answer."""
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    texts = _parts(blocks)
    fields: Fields = {"role": "assistant", "content": texts or (None if calls else "")}
    if thinking:
        fields["reasoning_content"] = thinking
    if calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return _marked(fields, next((call.cache_control for call in reversed(calls) if call.cache_control), None))


def _result(block: ToolResultBlock) -> Fields:
    """Return the result of a call; the text of a failed call says so, since chats have no field for it."""
    parts = _parts(block.content or ())
    if block.is_error:
        parts = [{"type": "text", "text": "Error: "}, *parts]
    fields: Fields = {"role": "tool", "content": parts, "tool_call_id": block.tool_use_id}
    return _marked(fields, block.cache_control)


def _marked(fields: Fields, mark: Mark) -> Fields:
    return fields if mark is None else fields | {"cache_control": mark}


def _parts(blocks: Sequence[Block]) -> list[Fields]:
    """Return texts as parts of a chat message's content, with their marks."""
    return [
        _marked({"type": "text", "text": block.text}, block.cache_control)
        for block in blocks
        if isinstance(block, TextBlock)
    ]
