"""Bodies of requests to `/v1/completions` and `/v1/chat/completions`; `request_fields.py` has their common fields."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PlainValidator, ValidationInfo, field_validator, model_validator

from megatron_ext.server.http.body import JsonReader, NotJson
from megatron_ext.server.openai.request_fields import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    Body,
    BoundedBy,
    GenerationRequest,
    Ids,
    JsonObject,
    JsonValue,
    LenientObject,
    Name,
    Prompts,
    Schema,
    Text,
)
from megatron_ext.text.chat_template import ENABLE_THINKING, INVALID_JSON, ChatOptions

MAX_MARKS = 4  # `cache_control` marks in a conversation: each costs a tokenization
MAX_TOOLS = 128
MAX_CALLS = 1024  # tool calls in an answer
MAX_PARTS = 10_000  # of one message
MAX_VARIABLES = 64  # variables of a chat template
LONGEST_TOOL_NAME = 128  # characters
LONGEST_EFFORT = 32  # characters
TOOL_MODES = ("auto", "none", "required")


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    prompt: Prompts
    """A text, token ids, or a list of either."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Return log-probs, and so many of the best tokens."""
    echo: bool | None = None
    """Begin the text with the prompt; false by default."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one or several."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return cast("list[str | list[int]]", prompt)


class CacheControl(Body):
    """Mark of a prefix that is worth caching: other prompts may have everything before it in common with this one."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None  # of the Messages API, without effect
    """Accepted without effect."""


class TextPart(Body):
    """Part of a message's content; only text is supported."""

    type: Literal["text"]
    text: Text
    """Text of the part."""
    cache_control: Annotated[CacheControl | None, Field(exclude=True)] = None  # templates do not see it
    """Other prompts may have everything up to here in common."""


class Message(LenientObject):
    """Message of a conversation."""

    role: Name
    """Author of the message: `system`, `user`, `assistant`, `tool` and others."""
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    """Text of the message, or its parts."""
    name: Name | None = None
    """Name of the author, or of the function that answered."""
    tool_calls: Annotated[list[JsonObject], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Calls of an assistant's message."""
    function_call: Annotated[JsonObject | None, Field(exclude=True)] = None
    """Call of an assistant's message in OpenAI's older form, without an id."""
    refusal: Annotated[Text | None, Field(exclude=True)] = None
    """Text of an assistant's message without a content."""
    tool_call_id: Text | None = None
    """Call that a tool's message answers."""
    reasoning_content: Text | None = None
    """Thinking of an assistant's message, for templates that keep it."""
    reasoning: Text | None = None
    """Synonym of `reasoning_content`."""
    prompt_token_ids: Annotated[Ids | None, Field(exclude=True)] = None
    """Token ids of the conversation before an assistant's message, as an answer with `return_token_ids` has them."""
    generation_token_ids: Annotated[Ids | None, Field(exclude=True)] = None
    """Token ids of an assistant's message, as it was generated."""
    cache_control: Annotated[CacheControl | None, Field(exclude=True)] = None  # of the whole message
    """Other prompts may have everything up to here in common."""

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        if isinstance(value, list):
            value = [  # a refusal is the text that the assistant has said
                {"type": "text", "text": part.get("refusal")}
                if isinstance(part, dict) and part.get("type") == "refusal"
                else part
                for part in value
            ]
        parts = [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
        other = next((part["type"] for part in parts if part.get("type", "text") != "text"), None)
        if other is not None:
            raise ValueError(f"has a part of type {other!r}; only parts of type 'text' are supported")
        return value

    @property
    def marks(self) -> int:
        """Return the number of `cache_control` marks."""
        parts = self.content if isinstance(self.content, list) else []
        return sum(part.cache_control is not None for part in parts) + (self.cache_control is not None)

    def marked_prefixes(self) -> Iterator[Message]:
        """Yield the message up to each of its parts with a `cache_control` mark, and whole if it has one itself."""
        parts = self.content if isinstance(self.content, list) else []
        for i, part in enumerate(parts):
            if part.cache_control is not None:
                yield self.model_copy(update={"content": "".join(part.text for part in parts[: i + 1])})
        if self.cache_control is not None:
            yield self

    def to_dict(self, arguments: JsonReader) -> dict[str, object]:
        """Return the message for chat templates: content is one text, and tool call arguments are objects.

        Args:
            arguments: Reader of the arguments of the conversation's tool calls.

        Raises:
            ApiError: Arguments are not JSON, or exceed the limits of one request.
        """
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        fields = self.model_dump(exclude_none=True) | ({} if content is None else {"content": content})
        calls = self.tool_calls
        if self.function_call is not None and not calls:
            calls = [{"type": "function", "function": self.function_call}]
        if calls is not None:
            fields["tool_calls"] = [_with_object(call, arguments) for call in calls]
        if content is None and not calls and (self.refusal or self.reasoning_content or self.reasoning):
            fields["content"] = self.refusal or ""
        if self.role == "function":  # the result of such a call
            fields["role"] = "tool"
        thinking = fields.pop("reasoning", None)  # templates know the older name
        return fields if thinking is None else {"reasoning_content": thinking} | fields


def dicts_of(messages: Iterable[Message]) -> list[dict[str, object]]:
    """Return messages for chat templates; errors as of `Message.to_dict`."""
    arguments = JsonReader("the JSON text of tool calls", "messages")
    return [message.to_dict(arguments) for message in messages]


def _with_object(call: dict[str, object], reader: JsonReader) -> dict[str, object]:
    """Return a tool call with its arguments, JSON text in OpenAI's form, as an object.

    Raises:
        ApiError: See `JsonReader.read`.
    """
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    given = function.get("arguments")
    if isinstance(given, dict):
        return call
    text = given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)
    try:
        parsed = reader.read((text or "{}").encode())
    except NotJson:
        parsed = None
    arguments = parsed if isinstance(parsed, dict) else {INVALID_JSON: text}
    return call | {"function": function | {"arguments": arguments}}


class Function(Body):
    """Function that a model may call."""

    name: Annotated[Text, Field(min_length=1, max_length=LONGEST_TOOL_NAME)]
    """Name of the function."""
    description: Text | None = None
    """Purpose of the function, for the model."""
    parameters: Schema | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Make arguments follow the schema where the model may also answer with text; false by default."""


class Tool(Body):
    """Tool: OpenAI's wrapper of a function."""

    type: Literal["function"]
    function: Function
    """Name, description and parameters of the function."""
    cache_control: Annotated[CacheControl | None, Field(exclude=True)] = None  # tools end with the system prompt
    """Other prompts may have everything up to here in common."""


@dataclass(frozen=True)
class ToolChoice:
    """Choice among tools.

    Attributes:
        mode: "auto", "none" or "required".
        names: Functions that may be called; None for all.
    """

    mode: str = "auto"
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, value: object) -> ToolChoice:
        """Convert a JSON value: a mode, a function to call, or OpenAI's list of allowed tools.

        Raises:
            ValueError: The value has another form.
        """
        if value is None:
            return cls()
        if isinstance(value, str) and value in TOOL_MODES:
            return cls(value)
        if isinstance(value, dict) and value.get("type") == "function":
            return cls("required", (_function_name(value),))
        if isinstance(value, dict) and value.get("type") == "allowed_tools":
            allowed = value.get("allowed_tools")
            listed = allowed.get("tools") if isinstance(allowed, dict) else None
            mode = allowed.get("mode") if isinstance(allowed, dict) else None
            if isinstance(listed, list) and len(listed) > MAX_TOOLS:
                raise ValueError(f"lists {len(listed)} tools; at most {MAX_TOOLS} are allowed")
            if isinstance(listed, list) and listed and mode in ("auto", "required"):
                return cls(mode, tuple(_function_name(one) for one in listed))
        raise ValueError(
            f"{json.dumps(value)[:60]} is not known; give one of {', '.join(TOOL_MODES)}, or "
            '{"type": "function", "function": {"name": ...}}'
        )

    def check(self, given: Collection[str]) -> None:
        """Check that the functions it names are given.

        Args:
            given: Names of the tools.

        Raises:
            ValueError: One is not, or a call is demanded without tools.
        """
        if self.mode == "required" and not given:
            raise ValueError("asks for a call, and there are no tools; give some or leave it out")
        unknown = [name for name in self.names or () if name not in given]
        if unknown:
            raise ValueError(f"names {unknown[0]!r}, which is not in tools")


def _function_name(value: object) -> str:
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise ValueError('needs the name of a function, as in {"type": "function", "function": {"name": "weather"}}')
    return name


Choice = Annotated[
    ToolChoice,
    PlainValidator(ToolChoice.of, json_schema_input_type=Literal["auto", "none", "required"] | dict[str, Any] | None),
    BoundedBy("MAX_TOOLS"),
]


Variables = Annotated[JsonObject, Field(max_length=MAX_VARIABLES)]  # `ChatOptions.check` checks their names


class TemplateFields(Body):
    """Template options of a chat request, beside its messages."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call."""
    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of an answer; true by default."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it; false by default."""
    chat_template_kwargs: Variables | None = None
    """Variables of the chat template."""
    enable_thinking: bool | None = None
    """Variable of the chat template, as in `chat_template_kwargs`, which come first."""
    reasoning_effort: Annotated[str, Field(max_length=LONGEST_EFFORT)] | None = None
    """Effort of thinking, for templates that know it; `none` turns thinking off."""
    verbosity: Annotated[str, Field(max_length=LONGEST_EFFORT)] | None = None
    """Length of answers, for templates that know it."""
    prevent_retokenization: bool | None = None
    """Use the token ids that the last message of the assistant carries; true by default."""

    @model_validator(mode="after")
    def _ends_agree(self) -> TemplateFields:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other; give one of them")
        return self

    @property
    def reads_sent_ids(self) -> bool:
        """Return whether token ids that the last message of the assistant carries are used."""
        return self.prevent_retokenization is not False

    @property
    def has_options(self) -> bool:
        """Return whether any template option is set."""
        given = (self.tools, self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        return any(one is not None for one in given)

    @property
    def chat_options(self) -> ChatOptions:
        """Return the template options as `ChatOptions`."""
        adds = self.add_generation_prompt is not False and not self.continue_final_message
        thinking = {} if self.enable_thinking is None else {ENABLE_THINKING: self.enable_thinking}
        return ChatOptions(
            add_generation_prompt=adds,
            continue_final_message=bool(self.continue_final_message),
            tools=tuple(tool.model_dump(exclude_none=True) for tool in self.tools or ()),
            variables=thinking | (self.chat_template_kwargs or {}),
            reasoning_effort=self.reasoning_effort,
            verbosity=self.verbosity,
        )


class ChatRequest(TemplateFields, GenerationRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """The conversation, oldest message first."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate; by default 16 for completions, as many as fit for chats."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Return log-probs of the answer's tokens; false by default."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Number of best tokens at each position; needs `logprobs`; 0 by default."""
    tool_choice: Choice = ToolChoice()
    """`none`, `auto`, `required`, or the function that must be called; "auto" by default."""
    parallel_tool_calls: bool | None = None
    """Permission for several calls in an answer; true by default."""
    prediction: JsonValue = None  # without effect: drafts are the engine's
    """Accepted without effect."""
    separate_reasoning: bool | None = None
    """Return thinking apart from the content; true by default."""
    thinking_budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of thinking; by default as many as the answer may have."""

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; set it or leave top_logprobs out")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens contradict each other; give one of them")
        marks = sum(message.marks for message in self.messages)
        if marks > MAX_MARKS:
            raise ValueError(f"messages have {marks} cache_control marks; at most {MAX_MARKS} are allowed")
        return self

    @field_validator("tool_choice")
    @classmethod
    def _chooses_given_tools(cls, value: ToolChoice, info: ValidationInfo) -> ToolChoice:
        value.check({tool.function.name for tool in info.data.get("tools") or ()})
        return value

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Return the tools that may be called."""
        if self.tool_choice.mode == "none":
            return ()
        names = self.tool_choice.names
        return tuple(tool for tool in self.tools or () if names is None or tool.function.name in names)

    @property
    def marked_prefixes(self) -> list[list[Message]]:
        """Return the conversation up to each `cache_control` mark."""
        return [[*self.messages[:i], prefix] for i, one in enumerate(self.messages) for prefix in one.marked_prefixes()]

    @property
    def max_calls(self) -> int:
        """Return the maximum number of tool calls to parse; 0 without tools or with `tool_choice` "none"."""
        if not self.callable_tools:
            return 0
        return 1 if self.parallel_tool_calls is False else MAX_CALLS
