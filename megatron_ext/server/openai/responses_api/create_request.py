"""Body of `/v1/responses`, the chat request that it is, and the stored conversation that it continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    field_validator,
)

from megatron_ext.config.annotations import FieldValues
from megatron_ext.server.api_errors import LONGEST_NAME, ApiError
from megatron_ext.server.openai.protocol import (
    LONGEST_EFFORT,
    LONGEST_TOOL_NAME,
    MAX_TOOLS,
    ChatRequest,
    Function,
    Message,
    Tool,
    ToolChoice,
    Variables,
)
from megatron_ext.server.openai.request_fields import (
    MAX_FIELDS,
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    Body,
    BoundedBy,
    LenientObject,
    ModelName,
    Name,
    SamplingFields,
    Schema,
    Text,
    response_format,
)
from megatron_ext.server.openai.responses_api.conversation import (
    HostedItem,
    ItemReference,
    Items,
    items_of,
    messages_of,
)
from megatron_ext.server.openai.responses_api.response_store import ResponseStore, StoredResponse

MAX_METADATA = 16


def _few(value: object) -> object:
    """Refuse many metadata before pydantic looks at each: it would keep an error of each, and count them last."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"has {len(value)} items and may have at most {MAX_METADATA} items")
    return value


# OpenAI's limits: responses repeat metadata, and stores keep them.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(_few),
]
LOGPROBS = "message.output_text.logprobs"
# Items that the other values ask about never occur here.
_Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


def _is_hosted(tool: object) -> bool:
    """Return whether a tool is of a kind that this server does not have."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return isinstance(kind, str) and kind != "function"


def tool_choice(value: object) -> ToolChoice:
    """Return a tool choice, given in the flat form of the Responses API or in the form of chat completions.

    Raises:
        ValueError: The value has another form, or forces a tool that this server does not have.
    """
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and "allowed_tools" not in value:
        listed, mode = value.get("tools"), value.get("mode")
        hosted = list(filter(_is_hosted, listed)) if isinstance(listed, list) else []
        if not hosted:
            return ToolChoice.of({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}})
        functions = [tool for tool in listed or () if tool not in hosted]
        if functions:
            return tool_choice(value | {"tools": functions})
        if mode == "auto":
            return ToolChoice("none")
        raise _no_such_tool(hosted[0]["type"])
    if _is_hosted(value):
        assert isinstance(value, dict), "it has a type"
        if not (value["type"] == "allowed_tools" and "allowed_tools" in value):
            raise _no_such_tool(value["type"])
    return ToolChoice.of(value)


def _no_such_tool(kind: str) -> ValueError:
    return ValueError(f"forces a tool of type {json.dumps(kind)[:LONGEST_NAME]}, which this server does not have")


def _text_format(value: dict[str, object]) -> dict[str, object]:
    response_format(_chat_format(value))
    return value


def _chat_format(value: Mapping[str, object]) -> dict[str, object]:
    """Return a format of text as the response format of a chat: the schema's fields are an object of their own."""
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError('has a type other than "text", "json_object" and "json_schema"')
    if kind != "json_schema" or "json_schema" in value:
        return dict(value)
    return {"type": kind, "json_schema": {name: one for name, one in value.items() if name != "type"}}


class FunctionTool(Function):
    """Function that the model may call."""

    type: Literal["function"]

    @property
    def tool(self) -> Tool:
        """Return the tool of a chat request."""
        fields = {name: getattr(self, name) for name in Function.model_fields}
        return Tool(type="function", function=Function(**fields))


class HostedTool(LenientObject):
    """Tool of another kind, such as `web_search` or `custom`, which this server does not have; it is left out."""

    type: Annotated[Text, Field(min_length=1, max_length=LONGEST_TOOL_NAME)]
    """Kind of the tool."""


class Reasoning(Body):
    """Options of thinking. There are no summaries, so nothing else than the effort has an effect."""

    effort: Annotated[str, Field(max_length=LONGEST_EFFORT)] | None = None
    """Effort of thinking, for templates that know it."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted without effect."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted without effect."""


class TextOptions(Body):
    """Options of the text."""

    format: Annotated[Schema, AfterValidator(_text_format)] | None = None
    """Format of the answer."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Length of answers, for templates that know it."""


class ResponseStreamOptions(Body):
    """Options of a stream, without effect: nothing is padded."""

    include_obfuscation: bool | None = None
    """Unsupported field, accepted with a value that changes nothing."""


def _tag_of(tool: object) -> str:
    return "a hosted tool" if _is_hosted(tool) else "a function"  # error messages leave names with spaces out of places


_Tool = Annotated[
    Annotated[FunctionTool, Tag("a function")] | Annotated[HostedTool, Tag("a hosted tool")], Discriminator(_tag_of)
]
Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
Choice = Annotated[
    ToolChoice,
    PlainValidator(tool_choice, json_schema_input_type=Literal["auto", "none", "required"] | dict[str, Any] | None),
    BoundedBy("MAX_TOOLS"),
]


class ResponsePrompt(Body):
    """Fields of a request that make its prompt: the body of `/v1/responses/input_tokens`."""

    answers: ClassVar[bool] = False

    model: ModelName | None = None
    """Name of the served model, or its root."""
    input: Items = Field(default_factory=list)
    """A text, or items: messages, calls, their results, thinking."""
    instructions: Text | None = None
    """The system's message."""
    previous_response_id: Name | None = None
    """Stored response to continue; with `--responses-store-mb`."""
    tools: Tools | None = None
    """Functions that the model may call; tools of other kinds are left out."""
    reasoning: Reasoning | None = None
    """Options of thinking."""
    text: TextOptions | None = None
    """Format and length of the answer."""
    chat_template_kwargs: Variables | None = None
    """Variables of the chat template."""
    enable_thinking: bool | None = None
    """Variable of the chat template, as in `chat_template_kwargs`, which come first."""
    cache_salt: Name | None = None
    """Requests share cached prefixes with those of the same salt only."""
    return_token_ids: bool | None = None
    """Return token ids of prompt and answer, too; false by default."""

    @property
    def functions(self) -> list[FunctionTool]:
        """Return the tools that are functions."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def left_out(self) -> list[str]:
        """Return the kinds of tools and items that are left out."""
        kinds = (one.type for one in (*(self.tools or ()), *self.input) if isinstance(one, HostedTool | HostedItem))
        return list(dict.fromkeys(kinds))

    @property
    def template_fields(self) -> FieldValues:
        """Return the options of the chat template, as fields of a chat request."""
        return {
            "tools": None if self.tools is None else [tool.tool for tool in self.functions],
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
            "enable_thinking": self.enable_thinking,
        }

    def chat_request(self, messages: Sequence[Message]) -> ChatRequest:
        """Return the chat request of a conversation, whose fields have been checked as this body's."""
        return ChatRequest.model_construct(**self.template_fields, messages=messages, cache_salt=self.cache_salt)


class ResponsesRequest(SamplingFields, ResponsePrompt):
    """Body of `/v1/responses`."""

    answers: ClassVar[bool] = True

    stream: bool | None = None
    """Send the answer in parts, as server-sent events; false by default."""
    stream_options: ResponseStreamOptions | None = None
    """Options of a stream."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate; by default as many as fit."""
    tool_choice: Choice = ToolChoice()
    """`none`, `auto`, `required`, or the function that must be called; "auto" by default."""
    parallel_tool_calls: bool | None = None
    """Permission for several calls in an answer; true by default."""
    include: Annotated[list[_Included], Field(max_length=MAX_FIELDS, fail_fast=True)] | None = None
    """Parts to add; log-probs are."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Number of best tokens at each position; `include` must name log-probs; 0 by default."""
    thinking_budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of thinking; by default as many as the answer may have."""
    truncation: Literal["auto", "disabled"] | None = None
    """Truncation of prompts, which happens with neither value; "disabled" by default."""
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Accepted without effect: it limits tools that run on a server."""
    metadata: Metadata | None = None  # type: ignore[assignment]  # of texts only
    """Texts by name, which the response repeats."""

    @field_validator("tool_choice")
    @classmethod
    def _chooses_given_tools(cls, value: ToolChoice, info: ValidationInfo) -> ToolChoice:
        tools = info.data.get("tools") or ()
        functions = {tool.name for tool in tools if isinstance(tool, FunctionTool)}
        if value.mode == "required" and tools and not functions:
            raise _no_such_tool(tools[0].type)
        value.check(functions)
        return value

    @property
    def has_scores(self) -> bool:
        """Return whether log-probs are asked for."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def chat_request(self, messages: Sequence[Message]) -> ChatRequest:
        """Return the chat request of a conversation, whose fields have been checked as this body's."""
        text = self.text or TextOptions()
        shared = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return ChatRequest.model_construct(
            **shared,
            **self.template_fields,
            model=self.model,
            messages=list(messages),
            stream=self.stream,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.has_scores,
            top_logprobs=self.top_logprobs,
            response_format=None if text.format is None else response_format(_chat_format(text.format)),
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            thinking_budget_tokens=self.thinking_budget_tokens,
            verbosity=text.verbosity,
        )


@dataclass(frozen=True)
class Conversation:
    """Conversation of a request.

    Attributes:
        messages: Messages of the chat.
        items: The request's own input items, as JSON values.
        before: Stored response that they follow.
    """

    messages: list[Message]
    items: list[object]
    before: StoredResponse | None


def conversation_of(body: ResponsePrompt, store: ResponseStore, tenant: str) -> Conversation:
    """Return the conversation of a request, including the earlier turns that it continues.

    Args:
        body: Request.
        store: Stored responses.
        tenant: Tenant of the request.

    Raises:
        ApiError: A response or item that it names is not stored, or the conversation is invalid or too long.
    """
    name = body.previous_response_id
    before = None if name is None else store.get((tenant, name), "previous_response_id")
    named = [store.item((tenant, one.id), "input") for one in body.input if isinstance(one, ItemReference)]
    known = store.conversation(before, sum(map(len, named)))
    found = iter(named)
    own = [json.loads(next(found)) if isinstance(one, ItemReference) else one.model_dump() for one in body.input]
    count = len(known) + len(own)
    if count > MAX_MESSAGES:
        raise ApiError(400, f"the conversation has {count} items; at most {MAX_MESSAGES} are allowed", param="input")
    return Conversation(messages_of(items_of([*known, *own]), body.instructions), own, before)
