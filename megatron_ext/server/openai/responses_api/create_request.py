"""Body of `/v1/responses`, and the chat request that it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo, field_validator

from megatron_ext.config.annotations import FieldValues
from megatron_ext.server.api_errors import LONGEST_NAME
from megatron_ext.server.openai.protocol import (
    LONGEST_EFFORT,
    LONGEST_TOOL_NAME,
    MAX_TOOLS,
    ChatRequest,
    Function,
    Message,
    TemplateFields,
    Tool,
    ToolChoice,
    Variables,
)
from megatron_ext.server.openai.request_fields import (
    MAX_FIELDS,
    MAX_TOP_LOGPROBS,
    Body,
    BoundedBy,
    JsonObject,
    ModelName,
    Name,
    Neutral,
    SamplingFields,
    Schema,
    Text,
    only_neutral,
    response_format,
)
from megatron_ext.server.openai.responses_api.conversation import Items
from megatron_ext.text.chat_template import ChatOptions

MAX_METADATA, LONGEST_METADATA_NAME, LONGEST_METADATA = 16, 64, 512
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
# Fields of features that are not supported, and their neutral values; None is always neutral.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
}


def function_tools(value: object) -> object:
    """Return a list of tools, which are all functions.

    Raises:
        ValueError: One has another type.
    """
    for tool in value if isinstance(value, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else "function"
        if kind != "function":
            shown = json.dumps(kind)[:LONGEST_NAME]
            raise ValueError(f"has a tool of type {shown}; there are no built-in tools here, only type 'function'")
    return value


def tool_choice(value: object) -> ToolChoice:
    """Return a tool choice, in the flat form of the Responses API or in that of chat completions.

    Raises:
        ValueError: The value has another form, or chooses a built-in tool.
    """
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and "allowed_tools" not in value:
        function_tools(value.get("tools"))
        listed = {"mode": value.get("mode"), "tools": value.get("tools")}
        return ToolChoice.of({"type": "allowed_tools", "allowed_tools": listed})
    return ToolChoice.of(value)


def few_texts(value: dict[str, object]) -> dict[str, object]:
    """Return metadata, which responses repeat and stores keep.

    Raises:
        ValueError: They exceed OpenAI's limits, or are not texts.
    """
    if len(value) > MAX_METADATA:
        raise ValueError(f"has {len(value)} fields; at most {MAX_METADATA} are taken")
    for name, text in value.items():
        if len(name) > LONGEST_METADATA_NAME:
            raise ValueError(f"has a name of {len(name)} characters; at most {LONGEST_METADATA_NAME} are taken")
        if not isinstance(text, str) or len(text) > LONGEST_METADATA:
            found = f"a text of {len(text)} characters" if isinstance(text, str) else "no text"
            raise ValueError(f"{name} has {found}; give a text of at most {LONGEST_METADATA} characters")
    return value


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


class FunctionTool(Body):
    """Function that the model may call."""

    type: Literal["function"]
    name: Annotated[Text, Field(min_length=1, max_length=LONGEST_TOOL_NAME)]
    """Name of the function."""
    description: Text | None = None
    """Purpose of the function, for the model."""
    parameters: Schema | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Make arguments follow the schema where the model may also answer with text; false by default."""

    @property
    def tool(self) -> Tool:
        """Return the tool of a chat request."""
        fields = {name: getattr(self, name) for name in Function.model_fields}
        return Tool(type="function", function=Function(**fields))


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


Tools = Annotated[
    Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)], BeforeValidator(function_tools)
]
Choice = Annotated[
    ToolChoice,
    PlainValidator(tool_choice, json_schema_input_type=Literal["auto", "none", "required"] | dict[str, Any] | None),
    BoundedBy("MAX_TOOLS"),
]


class ResponsePrompt(Body):
    """Fields of a request that make its prompt: the body of `/v1/responses/input_tokens`."""

    model: ModelName | None = None
    """Name of the served model, or its root."""
    input: Items = Field(default_factory=list)
    """A text, or items: messages, calls, their results, thinking."""
    instructions: Text | None = None
    """The system's message."""
    previous_response_id: Name | None = None
    """Stored response to continue; with `--responses-store-mb`."""
    tools: Tools | None = None
    """Functions that the model may call."""
    reasoning: Reasoning | None = None
    """Options of thinking."""
    text: TextOptions | None = None
    """Format and length of the answer."""
    chat_template_kwargs: Variables | None = None
    """Variables of the chat template."""
    return_token_ids: bool | None = None
    """Return token ids of prompt and answer, too; false by default."""

    @property
    def template_fields(self) -> FieldValues:
        """Return the options of the chat template, as fields of a chat request."""
        return {
            "tools": None if self.tools is None else [tool.tool for tool in self.tools],
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }

    @property
    def chat_options(self) -> ChatOptions:
        """Return the options of the chat template."""
        return TemplateFields.model_construct(**self.template_fields).chat_options


class ResponsesRequest(SamplingFields, ResponsePrompt):
    """Body of `/v1/responses`."""

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
    prompt_cache_retention: Name | None = None
    """Accepted without effect."""
    metadata: Annotated[JsonObject, AfterValidator(few_texts)] | None = None
    """Texts by name, which the response repeats."""
    background: Neutral = None
    conversation: Neutral = None
    prompt: Neutral = None
    context_management: Neutral = None
    moderation: Neutral = None

    @field_validator("tool_choice")
    @classmethod
    def _chooses_given_tools(cls, value: ToolChoice, info: ValidationInfo) -> ToolChoice:
        value.check({tool.name for tool in info.data.get("tools") or ()})
        return value

    @field_validator(*_UNSUPPORTED)
    @classmethod
    def _asks_for_nothing(cls, value: object, info: ValidationInfo) -> object:
        return only_neutral(value, _UNSUPPORTED[str(info.field_name)])

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
