"""The bodies of requests: OpenAI's fields, and those that this engine adds.

Types are strict ("5" is no number) and unknown fields are refused. Fields of OpenAI's that ask for something that the
engine does not do are taken as long as they ask for nothing, because clients send them with every request. Whatever a
client can send many of is counted first: pydantic would make an error of each.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megatron_ext.errors import ConfigError

MOST_CHOICES = 128
MOST_TOP_LOGPROBS = 20
MOST_FIELDS = 128  # of one object
MOST_MESSAGES = 10_000
MOST_STOP_WORDS = 64  # each is looked for after every token, by the thread that steps the engine
LONGEST_STOP_WORD = 1024  # characters

# Values with which a field asks for nothing; None is always one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


def whole_characters(text: str) -> str:
    """The text, if it is one: JSON can say halves of characters, which no tokenizer can read.

    Raises:
        ConfigError: It has such a half.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError("has half of a surrogate pair, which is no character") from None
    return text


def checked_prompts(value: object) -> object:
    """One prompt or several, looked at as a whole: millions of token ids pass, or fail, without a step for each.

    Raises:
        ValueError: It is something else.
    """
    items: str | list[Any]
    kinds: set[type]
    if isinstance(value, str):
        items, kinds = value, {str}
    elif isinstance(value, list):
        items, kinds = value, set(map(type, value))
    else:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of those")
    if not items:
        raise ValueError("is empty; it needs at least one token")
    if kinds == {str}:
        whole_characters("".join(items))
    elif kinds == {list}:
        kinds = set(map(type, chain.from_iterable(items))) | {int}
    if kinds not in ({str}, {int}):
        raise ValueError("must have strings only, or token ids (integers) only, or lists of those only")
    return value


Text = Annotated[str, AfterValidator(whole_characters)]
# What the description of the routes says; the check is ours.
Prompts = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(checked_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class Body(BaseModel):
    """JSON with strict types and known fields only."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"has {len(value)} fields; at most {MOST_FIELDS} are taken")
        return value


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # there is none


class OpenAIFields(Body):
    """OpenAI's fields of both routes that this engine heeds."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Text | list[Text] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None  # 0 is greedy
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _has_few_stop_words(cls, value: object) -> object:
        words = value if isinstance(value, list) else [value]
        if len(words) > MOST_STOP_WORDS:
            raise ValueError(f"has {len(words)} words; at most {MOST_STOP_WORDS} are taken")
        longest = max((len(word) for word in words if isinstance(word, str)), default=0)
        if longest > LONGEST_STOP_WORD:
            raise ValueError(f"has a word of {longest} characters; at most {LONGEST_STOP_WORD} are taken")
        return value

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> OpenAIFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream; set it or leave stream_options out")
        return self

    @property
    def stop_words(self) -> tuple[str, ...]:
        """As a tuple, whatever it was."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class EngineFields(Body):
    """What is not OpenAI's."""

    min_tokens: Annotated[int, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1 are off
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    enable_prefix_caching: bool | None = None


class ClientFields(Body):
    """What clients say for their own books, without effect on the answer."""

    user: str | None = None
    metadata: dict[str, object] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class NeutralFields(Body):
    """What is taken as long as it asks for nothing; see `_NEUTRAL`, whose fields of either route are checked here."""

    frequency_penalty: object = None
    presence_penalty: object = None
    repetition_penalty: object = None
    logit_bias: object = None

    @field_validator(*_NEUTRAL, check_fields=False)
    @classmethod
    def _asks_for_nothing(cls, value: object, info: ValidationInfo) -> object:
        neutral = _NEUTRAL[str(info.field_name)]
        if value is not None and not any(type(value) is not bool and value == one for one in neutral):
            raise ValueError("is not supported; leave it out")
        return value


# pydantic takes the fields of the last base first, and the first error in this order is the one that a client is told.
class GenerationRequest(NeutralFields, ClientFields, EngineFields, OpenAIFields):
    """What both routes have in common. None is the same as leaving a field out."""


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: object = None
    best_of: object = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return cast("list[str | list[int]]", prompt)


class TextPart(Body):
    """A part of a message's content; there is only text."""

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One message of a conversation. Fields that clients send back from an answer and that are unknown are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Text
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, object]], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        parts = [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
        other = next((part["type"] for part in parts if part.get("type", "text") != "text"), None)
        if other is not None:
            raise ValueError(f"has a part of type {other!r}; this server takes texts only, parts of type 'text'")
        return value

    def to_dict(self) -> dict[str, object]:
        """As chat templates take it: the content is one text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return self.model_dump(exclude_none=True) | ({} if content is None else {"content": content})


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None  # without effect
    response_format: object = None
    tools: object = None
    tool_choice: object = None
    functions: object = None
    function_call: object = None
    modalities: object = None
    audio: object = None
    prediction: object = None
    reasoning_effort: object = None
    verbosity: object = None
    web_search_options: object = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs; set it or leave top_logprobs out")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens contradict each other; give one of them")
        return self
