"""Bodies of requests to `/v1/messages` and `/v1/messages/count_tokens`.

Clients send many fields that only Anthropic's own service has. Unknown ones are ignored, which the log says once for
each name; contents that cannot be ignored, such as images, are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from megatron_ext.server.anthropic.error_envelope import THREADS_REFUSED
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.log import printable
from megatron_ext.server.openai.protocol import LONGEST_EFFORT, LONGEST_TOOL_NAME, MAX_PARTS, MAX_TOOLS, Variables
from megatron_ext.server.openai.request_fields import (
    MAX_MESSAGES,
    Body,
    JsonObject,
    JsonValue,
    ModelName,
    Name,
    Schema,
    Text,
    Words,
    option_bounds,
)
from megatron_ext.server.unknown_fields import note_ignored

_LONGEST_NAME = 100  # characters
_MAX_BETAS = 32  # of a header that are logged


class _Object(BaseModel):
    """Base of objects in a body: strict types; unknown fields are ignored, since clients copy some from answers."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)


Mark = JsonObject | None  # as in {"type": "ephemeral", "ttl": "5m"}


class TextBlock(_Object):
    """Block of text."""

    type: Literal["text"]
    text: Text
    """Text of the part."""
    cache_control: Mark = None
    """Other prompts may have everything up to here in common."""


class ThinkingBlock(_Object):
    """Thinking of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    """Thinking of an earlier answer."""


class RedactedThinkingBlock(_Object):
    """Thinking that only Anthropic's service can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Object):
    """Call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    """Id of the call."""
    name: Text
    """Name of the function."""
    input: JsonObject
    """Arguments of the call."""
    cache_control: Mark = None
    """Other prompts may have everything up to here in common."""


def _blocks_of(*known: str) -> BeforeValidator:
    """Return a conversion of a content to blocks; its error names the type of a block that is not known."""

    def convert(value: object) -> object:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        for block in value if isinstance(value, list) else ():
            given = block.get("type") if isinstance(block, dict) else None
            if isinstance(given, str) and given not in known:
                shown = printable(given, _LONGEST_NAME)
                raise ValueError(f"has a block of type {shown!r}; only {', '.join(known)} are supported")
        return value

    return BeforeValidator(convert, json_schema_input_type=str | list[dict[str, Any]])


_Texts = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True), _blocks_of("text")]


class ToolResultBlock(_Object):
    """Result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    """Call that the block answers."""
    content: _Texts | None = None
    """Result of the call, as a text or in blocks."""
    is_error: bool | None = None
    """Failure of the tool; false by default."""
    cache_control: Mark = None
    """Other prompts may have everything up to here in common."""


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


class MessageParam(_Object):
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


class ToolParam(_Object):
    """Function that the client runs."""

    name: Annotated[Text, Field(min_length=1, max_length=LONGEST_TOOL_NAME)]
    """Name of the function."""
    input_schema: Schema
    """JSON schema of the arguments."""
    description: Text | None = None
    """Purpose of the function, for the model."""
    strict: bool | None = None
    """Make arguments follow the schema where the model may also answer with text; false by default."""
    cache_control: Mark = None
    """Other prompts may have everything up to here in common."""


def _client_tools(value: object) -> object:
    """Refuse tools that Anthropic's service runs or describes."""
    for tool in value if isinstance(value, list) else ():
        given = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(given, str) and given != "custom":
            shown = printable(given, _LONGEST_NAME)
            raise ValueError(f"has a tool of type {shown!r}, which only Anthropic's service has; give an input_schema")
    return value


class ToolChoiceParam(_Object):
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


class ThinkingParam(_Object):
    """Thinking of the answer; of any kind but "enabled" and "disabled" the model decides."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of thinking."""

    @model_validator(mode="after")
    def _has_a_budget(self) -> ThinkingParam:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError('of type "enabled" needs budget_tokens')
        return self


class OutputFormatParam(_Object):
    """JSON schema of the answer."""

    type: Literal["json_schema"]
    json_schema: Schema = Field(alias="schema")
    """JSON schema that the answer follows."""


class OutputConfigParam(_Object):
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
    thread: JsonValue = None  # refused by `refuse_threads`
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


class MessagesRequest(CountTokensRequest):
    """Body of `/v1/messages`."""

    answers: ClassVar[bool] = True

    max_tokens: Annotated[int, Field(ge=1)]
    """Most tokens to generate."""
    stop_sequences: Words | None = None
    """Words that end an answer; the one found is named."""
    stream: bool | None = None
    """Send the answer in parts, as server-sent events; false by default."""
    temperature: Annotated[float, option_bounds("temperature")] | None = None
    """0 takes the most likely token; higher values are more random; 1 by default."""
    top_p: Annotated[float, option_bounds("top_p")] | None = None
    """Draw from the most likely tokens that have this probability together; 1 by default."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Draw from so many of the most likely tokens; 0 and -1 are off; 0 by default."""

    # Extensions of this engine
    enable_prefix_caching: bool | None = None
    """Use the prefix cache; true by default."""
    seed: int | None = None
    """Seed of sampling; equal seeds give equal answers."""

    @model_validator(mode="after")
    def _leaves_tokens_for_the_answer(self) -> MessagesRequest:
        budget = None if self.thinking is None or self.thinking.type != "enabled" else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} must be greater than thinking.budget_tokens {budget}")
        return self


def refuse_threads(body: CountTokensRequest) -> None:
    """Refuse a request in a thread: later ones would carry new messages only, and conversations are not kept here.

    The SDK then sends whole conversations.

    Raises:
        ApiError: 400, with the code that clients look for.
    """
    if body.thread is not None:
        message = "thread: conversations are not kept between requests; send all messages and leave thread out"
        raise ApiError(400, message, param="thread", code=THREADS_REFUSED)


def note_betas(header: str) -> None:
    """Log once for each feature of an `anthropic-beta` header that it has no effect."""
    for one in map(str.strip, header.split(",", _MAX_BETAS)[:_MAX_BETAS]):
        if one:
            note_ignored(f"the beta {one} of the Messages API")


Fields = dict[str, Any]
