"""Bodies of requests to `/v1/messages` and `/v1/messages/count_tokens`, and the chat requests that they become.

Clients send many fields that only Anthropic's own service has. Unknown ones are ignored, which the log says once for
each name; contents that cannot be ignored, such as images, are refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from megatron_ext.server.anthropic.error_envelope import THREADS_REFUSED
from megatron_ext.server.api_errors import LONGEST_NAME, ApiError, describe
from megatron_ext.server.log import printable
from megatron_ext.server.openai.protocol import (
    LONGEST_EFFORT,
    LONGEST_TOOL_NAME,
    MAX_PARTS,
    MAX_TOOLS,
    ChatRequest,
    Variables,
)
from megatron_ext.server.openai.request_fields import (
    MAX_MESSAGES,
    BasicSamplingFields,
    Body,
    JsonObject,
    JsonValue,
    LenientObject,
    ModelName,
    Name,
    Schema,
    Text,
    Words,
    note_ignored,
)
from megatron_ext.text.chat_template import ENABLE_THINKING

_MAX_BETAS = 32  # of a header that are logged
Mark = JsonObject | None  # as in {"type": "ephemeral", "ttl": "5m"}
Fields = dict[str, Any]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# A block of Claude Code's system prompt that differs from request to request: as text it would hide the cached prefix.
_BILLING = "x-anthropic-billing-header:"


class MarkedObject(LenientObject):
    """Base of what a `cache_control` mark may be on."""

    cache_control: Mark = None
    """Other prompts may have everything up to here in common."""


class TextBlock(MarkedObject):
    """Block of text."""

    type: Literal["text"]
    text: Text
    """Text of the part."""


class ThinkingBlock(LenientObject):
    """Thinking of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    """Thinking of an earlier answer."""


class RedactedThinkingBlock(LenientObject):
    """Thinking that only Anthropic's service can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(MarkedObject):
    """Call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    """Id of the call."""
    name: Text
    """Name of the function."""
    input: JsonObject
    """Arguments of the call."""


def _blocks_of(*known: str) -> BeforeValidator:
    """Return a conversion of a content to blocks; its error names the type of a block that is not known."""

    def convert(value: object) -> object:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        for block in value if isinstance(value, list) else ():
            given = block.get("type") if isinstance(block, dict) else None
            if isinstance(given, str) and given not in known:
                shown = printable(given, LONGEST_NAME)
                raise ValueError(f"has a block of type {shown!r}; only {', '.join(known)} are supported")
        return value

    return BeforeValidator(convert, json_schema_input_type=str | list[dict[str, Any]])


_Texts = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True), _blocks_of("text")]


class ToolResultBlock(MarkedObject):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    """Call that the block answers."""
    content: _Texts | None = None
    """Result of the call, as a text or in blocks."""
    is_error: bool | None = None
    """Failure of the tool; false by default."""


def _tag_of(block: object) -> str:
    """Return the tag of a block; error messages leave names with spaces out of places."""
    return f"type {block.get('type') if isinstance(block, dict) else getattr(block, 'type', None)}"


Block = Annotated[
    Annotated[TextBlock, Tag("type text")]
    | Annotated[ThinkingBlock, Tag("type thinking")]
    | Annotated[RedactedThinkingBlock, Tag("type redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("type tool_use")]
    | Annotated[ToolResultBlock, Tag("type tool_result")],
    Discriminator(_tag_of),
]
_Blocks = Annotated[
    list[Block],
    Field(max_length=MAX_PARTS, fail_fast=True),
    _blocks_of("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]
_OF_ROLE = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class MessageParam(LenientObject):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    """Author of the message."""
    content: _Blocks
    """Text of the message, or its parts."""

    @model_validator(mode="after")
    def _has_blocks_of_its_role(self) -> MessageParam:
        for block in self.content:
            if not isinstance(block, _OF_ROLE[self.role]):
                raise ValueError(f"has role {self.role!r}, and a block of type {block.type!r}")
        return self


class ToolParam(MarkedObject):
    """Function that the client runs."""

    name: Annotated[Text, Field(min_length=1, max_length=LONGEST_TOOL_NAME)]
    """Name of the function."""
    input_schema: Schema
    """JSON schema of the arguments."""
    description: Text | None = None
    """Purpose of the function, for the model."""
    strict: bool | None = None
    """Make arguments follow the schema where the model may also answer with text; false by default."""


def _client_tools(value: object) -> object:
    """Refuse tools that Anthropic's service runs or describes."""
    for tool in value if isinstance(value, list) else ():
        given = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(given, str) and given != "custom":
            shown = printable(given, LONGEST_NAME)
            raise ValueError(f"has a tool of type {shown!r}, which only Anthropic's service has; give an input_schema")
    return value


class ToolChoiceParam(LenientObject):
    """Choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    """Name of the function that must be called."""
    disable_parallel_tool_use: bool | None = None
    """Allow one call at most; false by default."""

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoiceParam:
        if self.type == "tool" and self.name is None:
            raise ValueError('of type "tool" needs the name of one')
        return self


class ThinkingParam(LenientObject):
    """Thinking of the answer; of any kind but "enabled" and "disabled" the model decides."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of thinking."""

    @model_validator(mode="after")
    def _has_a_budget(self) -> ThinkingParam:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError('of type "enabled" needs budget_tokens')
        return self


class OutputFormatParam(LenientObject):
    """JSON schema of the answer."""

    type: Literal["json_schema"]
    json_schema: Schema = Field(alias="schema")
    """JSON schema that the answer follows."""


class OutputConfigParam(LenientObject):
    """Effort and format of the answer."""

    effort: Annotated[str, Field(max_length=LONGEST_EFFORT)] | None = None
    """Effort of thinking, for templates that know it."""
    format: OutputFormatParam | None = None
    """Format of the answer."""


class CountTokensRequest(Body):
    """Body of `/v1/messages/count_tokens`: the fields that make the prompt."""

    answers: ClassVar[bool] = False

    model: ModelName | None = None
    """Name of the served model, or its root."""
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """The conversation, oldest message first."""
    system: _Texts | None = None
    """The system's message, as a text or in blocks."""
    tools: (
        Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True), BeforeValidator(_client_tools)] | None
    ) = None
    """Functions that the model may call."""
    tool_choice: ToolChoiceParam | None = None
    """Choice among the tools, as an object with a `type`; `auto` by default."""
    thinking: ThinkingParam | None = None
    """Thinking on or off, and its maximum number of tokens."""
    output_config: OutputConfigParam | None = None
    """Effort and format of the answer."""
    cache_control: Mark = None  # of the last message
    """Other prompts may have everything up to here in common."""
    thread: JsonValue = None
    """Refused: conversations are not kept between requests."""
    metadata: JsonValue = None
    """Accepted without effect."""
    service_tier: JsonValue = None
    """Accepted without effect."""

    # Extensions of this engine
    chat_template_kwargs: Variables | None = None
    """Variables of the chat template."""
    cache_salt: Name | None = None
    """Requests share cached prefixes with those of the same salt only."""

    @field_validator("thread")
    @classmethod
    def _is_missing(cls, value: object) -> object:
        """Refuse a thread, with the code by which the SDK sends whole conversations again."""
        if value is not None:
            message = "thread: conversations are not kept between requests; send all messages and leave thread out"
            raise ApiError(400, message, param="thread", code=THREADS_REFUSED)
        return value


class MessagesRequest(BasicSamplingFields, CountTokensRequest):
    """Body of `/v1/messages`."""

    answers: ClassVar[bool] = True

    max_tokens: Annotated[int, Field(ge=1)]
    """Most tokens to generate."""
    stop_sequences: Words | None = None
    """Words that end an answer; the one found is named."""
    stream: bool | None = None
    """Send the answer in parts, as server-sent events; false by default."""

    @model_validator(mode="after")
    def _leaves_tokens_for_the_answer(self) -> MessagesRequest:
        budget = None if self.thinking is None or self.thinking.type != "enabled" else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} must be greater than thinking.budget_tokens {budget}")
        return self


def note_betas(header: str) -> None:
    """Log once for each feature of an `anthropic-beta` header that it has no effect."""
    for one in map(str.strip, header.split(",", _MAX_BETAS)[:_MAX_BETAS]):
        if one:
            note_ignored(f"the beta {one} of the Messages API")


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
    fields: Fields = {"model": body.model, "cache_salt": body.cache_salt}
    fields |= {"messages": system + messages, "tools": _tools(body)}
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
    same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "enable_prefix_caching", "seed")
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
    tools = []
    for tool in body.tools:
        function: Fields = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        function["strict"] = tool.strict
        tools.append({"type": "function", "function": function, "cache_control": tool.cache_control})
    return tools


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
    mark = next((call.cache_control for call in reversed(calls) if call.cache_control), None)
    return fields | {"cache_control": mark}


def _result(block: ToolResultBlock) -> Fields:
    """Return the result of a call; the text of a failed call says so, since chats have no field for it."""
    parts = _parts(block.content or ())
    if block.is_error:
        parts = [{"type": "text", "text": "Error: "}, *parts]
    answered = block.tool_use_id
    return {"role": "tool", "content": parts, "tool_call_id": answered, "cache_control": block.cache_control}


def _parts(blocks: Sequence[Block]) -> list[Fields]:
    """Return texts as parts of a chat message's content, with their marks."""
    return [
        {"type": "text", "text": block.text, "cache_control": block.cache_control}
        for block in blocks
        if isinstance(block, TextBlock)
    ]
