"""Fields that the bodies of both routes share: OpenAI's, and extensions of this engine; `protocol.py` has the bodies.

Types are strict ("5" is not a number). Long lists are checked up to their first error: pydantic would create one for
each item.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from megatron_ext.config.options import options_of
from megatron_ext.config.request import JSON_OBJECT, MAX_CHECKPOINTS, REGEX, RequestParams, ResponseFormat, TokenBiases
from megatron_ext.server.api_errors import LONGEST_NAME, ApiError
from megatron_ext.server.log import printable

logger = logging.getLogger(__name__)

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_FIELDS = 128  # in one object
MAX_MESSAGES = 10_000
MAX_STOP_WORDS = 64  # each is searched after every token, in the engine's thread
LONGEST_STOP_WORD = 1024  # characters
MAX_BIASES = 1024
LONGEST_CLIENT_NAME = 512  # characters of names that clients give: users, keys, salts
LONGEST_MODEL = 4096  # characters; a path may be a name


# Fields of bodies that this server does not have: clients send many fields of other servers. They are ignored, and
# named in the log once; with `--strict-fields` they are refused. Fields that would change the answer are refused in any
# case, unless their values ask for what happens anyway.
IS_STRICT: ContextVar[bool] = ContextVar("strict_fields", default=False)
"""True while a server with `--strict-fields` handles a request."""
MAX_NOTED = 256  # names in the log
_noted: set[str] = set()

# Fields that would change the answer, with the values that do not. Null is the same as a missing field.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # of OpenAI's APIs
    **dict.fromkeys(("audio", "conversation", "moderation", "prompt", "web_search_options"), ()),
    **dict.fromkeys(("documents", "functions"), ([],)),
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    # of the other routes of this server
    **dict.fromkeys(("max_output_tokens", "max_tokens", "messages", "response_format", "stop_sequences", "system"), ()),
    "n": (1,),
    "stop": ([],),
    # of vLLM, SGLang, llama.cpp and services
    **dict.fromkeys(("allowed_token_ids", "chat_template", "ebnf", "json_schema", "lora_path"), ()),
    **dict.fromkeys(("grammar", "regex", "stop_regex", "structural_tag"), ()),
    **dict.fromkeys(("prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), ()),
    **dict.fromkeys(("early_stopping", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("no_stop_trim", "return_hidden_states", "return_routed_experts"), (False,)),
    **dict.fromkeys(("length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("add_special_tokens", "spaces_between_special_tokens"), (True,)),
    "logits_processors": ([],),
    "enable_thinking": (True,),
    "thinking": ({"type": "enabled"}, {"type": "auto"}, {"type": "adaptive"}),
}
_REMEDIES = {
    "enable_thinking": "use thinking",
    "thinking": "use enable_thinking",
}


def check_unknown(value: Mapping[str, object], known: Collection[str], *, answers: bool) -> None:
    """Check the unknown fields of an object, and note ignored ones.

    Args:
        value: Object of a body.
        known: Names of the fields that it may have.
        answers: Whether it is part of a request for an answer, which the fields in `UNSUPPORTED` would change.

    Raises:
        ApiError: One would change the answer, or is refused with `--strict-fields`.
    """
    for name, given in value.items():
        if name in known or given is None:
            continue
        neutral = UNSUPPORTED.get(name) if answers else None
        if neutral is None:
            shown = printable(name, LONGEST_NAME)
            if IS_STRICT.get():
                raise ApiError(400, f"{shown} is not a known field (--strict-fields)", param=shown)
            note_ignored(f"field {shown}")
        elif not any(isinstance(given, bool) == isinstance(one, bool) and given == one for one in neutral):
            anyway = " and ".join(json.dumps(one) for one in neutral)
            remedy = _REMEDIES.get(name, "leave it out")
            message = f"{name}: is not supported; {remedy}" + (f" ({anyway} is what happens anyway)" if neutral else "")
            raise ApiError(400, message, param=name)


def note_ignored(name: str) -> None:
    """Log once for each name that it has no effect; the number of names is bounded."""
    shown = printable(name, LONGEST_NAME)
    if shown not in _noted and len(_noted) < MAX_NOTED:
        _noted.add(shown)
        logger.info("this server does not use %s; it is ignored", shown)


@dataclass(frozen=True)
class BoundedBy:
    """Annotation of a text, list or mapping without a maximum length of its own.

    Attributes:
        limit: Limit that bounds it: a flag, a constant, or a check.
    """

    limit: str


def _prompts(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Return prompts as `check` does, with one error in place of one for each form.

    Raises:
        ValueError: They have none of the forms.
    """
    try:
        return check(value)
    except ValidationError:
        forms = "a string, a list of strings, a list of token ids (integers), or a list of such lists"
        raise ValueError(f"must be {forms}, none of them empty") from None


Text = Annotated[str, BoundedBy("--max-body-mb")]
Name = Annotated[str, Field(max_length=LONGEST_CLIENT_NAME)]
ModelName = Annotated[str, Field(min_length=1, max_length=LONGEST_MODEL)]
JsonValue = Annotated[object, BoundedBy("LIMITS and MAX_LEVELS of bodies")]
JsonObject = Annotated[dict[str, object], BoundedBy("LIMITS and MAX_LEVELS of bodies")]
Schema = Annotated[dict[str, object], BoundedBy("--max-schema-kb where it is compiled")]
_Word = Annotated[str, Field(min_length=1)]
_Row = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[
    _Word
    | _Row
    | Annotated[list[_Word], Field(min_length=1, fail_fast=True)]
    | Annotated[list[_Row], Field(min_length=1, fail_fast=True)],
    WrapValidator(_prompts),
    BoundedBy("--max-waiting-requests and the longest sequence"),
]


class Body(BaseModel):
    """Base of bodies and their parts: strict types. Unknown fields are ignored and noted; see `check_unknown`."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)
    answers: ClassVar[bool] = True  # False where only the prompt counts

    @model_validator(mode="before")
    @classmethod
    def _has_known_fields(cls, value: object) -> object:
        if isinstance(value, dict):
            if len(value) > MAX_FIELDS:
                raise ValueError(f"has {len(value)} fields; at most {MAX_FIELDS} are allowed")
            if cls.model_config["extra"] == "ignore":
                check_unknown(value, _names_of(cls), answers=cls.answers)
        return value


class LenientObject(BaseModel):
    """Base of objects that clients copy from answers: strict types; unknown fields are ignored without a note."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)


@cache
def _names_of(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def biases(value: object) -> object:
    """Return logit biases: numbers by token id, given as text.

    Raises:
        ValueError: The biases are malformed, too many, or too large.
    """
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} tokens; at most {MAX_BIASES} are allowed")
    if not isinstance(value, dict):
        raise ValueError(f"is not {TokenBiases.expected}")
    try:
        read = TokenBiases.of(value)
    except ValueError as error:
        raise ValueError(f"is not {error}") from None
    if read.problem is not None:
        raise ValueError(read.problem)
    return read


def response_format(value: object) -> object:
    """Return a response format, in OpenAI's form or with the `regex` extension.

    Raises:
        ValueError: The value is not a response format.
    """
    try:
        return ResponseFormat.of(value)
    except ValueError as error:
        raise ValueError(f"is not {error}") from None


def option_bounds(name: str) -> FieldInfo:
    """Return the bounds of an option of `RequestParams` as a pydantic field."""
    declared = options_of(RequestParams)[name]
    found: FieldInfo = Field(ge=declared.minimum, le=declared.maximum)
    return found


Form = Annotated[
    Any, PlainValidator(response_format, json_schema_input_type=dict[str, Any]), BoundedBy("--max-schema-kb")
]
Ids = Annotated[list[int], Field(fail_fast=True), BoundedBy("the longest sequence")]
Word = Annotated[str, Field(max_length=LONGEST_STOP_WORD)]
Words = Annotated[list[Word], Field(max_length=MAX_STOP_WORDS, fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_WORDS, fail_fast=True)]
Checkpoints = Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=MAX_CHECKPOINTS)]
Biases = Annotated[Any, PlainValidator(biases, json_schema_input_type=dict[str, float]), BoundedBy("MAX_BIASES")]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    """End the stream with the usage; false by default."""
    continuous_usage_stats: bool | None = None
    """Give each part the usage so far; false by default."""
    include_obfuscation: bool | None = None
    """Unsupported field, accepted with a value that changes nothing."""


Choices = Annotated[
    list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, fail_fast=True), BoundedBy("--max-schema-kb")
]


class StructuredOutputs(Body):
    """Structured output in vLLM's form; exactly one field is set."""

    json_schema: Schema | None = Field(None, alias="json")
    """JSON schema that the answer follows."""
    regex: Annotated[Text, Field(min_length=1)] | None = None
    """Regular expression that the answer matches."""
    json_object: bool | None = None
    """The answer is a JSON object; false by default."""
    choice: Choices | None = None
    """The answer is one of these texts."""

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if sum(map(bool, (self.json_schema is not None, self.regex, self.json_object, self.choice))) != 1:
            raise ValueError("needs one of json, regex, choice and json_object")
        return self

    @property
    def response_format(self) -> ResponseFormat:
        """Return the equivalent `ResponseFormat`."""
        if self.regex is not None:
            return ResponseFormat(REGEX, self.regex)
        if self.choice is not None:
            return ResponseFormat.choice(self.choice)
        return ResponseFormat(JSON_OBJECT) if self.json_schema is None else ResponseFormat.json_schema(self.json_schema)


class BasicSamplingFields(Body):
    """Fields that every generating route takes. None is the same as a missing field."""

    temperature: Annotated[float, option_bounds("temperature")] | None = None
    """0 takes the most likely token; higher values are more random; 1 by default."""
    top_p: Annotated[float, option_bounds("top_p")] | None = None
    """Draw from the most likely tokens that have this probability together; 1 by default."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Draw from so many of the most likely tokens; 0 and -1 are off; 0 by default."""
    seed: int | None = None
    """Seed of sampling; equal seeds give equal answers."""
    enable_prefix_caching: bool | None = None
    """Use the prefix cache; true by default."""


class SamplingFields(BasicSamplingFields):
    """Fields that the generating routes of OpenAI's APIs take."""

    # OpenAI's fields
    frequency_penalty: Annotated[float, option_bounds("frequency_penalty")] | None = None
    """Subtracted from a token's logit for each time that it was generated; 0 by default."""
    presence_penalty: Annotated[float, option_bounds("presence_penalty")] | None = None
    """Subtracted from the logits of tokens that were generated; 0 by default."""
    logit_bias: Biases | None = None
    """Numbers to add to logits, by token id."""

    # Extensions of this engine
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Tokens to generate before an end is possible; 0 by default."""
    min_p: Annotated[float, option_bounds("min_p")] | None = None
    """Least probability of a token, relative to the most likely one; 0 by default."""
    repetition_penalty: Annotated[float, option_bounds("repetition_penalty")] | None = None
    """Divides positive logits of tokens seen, and multiplies negative ones; 1 by default."""
    stop_token_ids: TokenIds | None = None
    """Token ids that end an answer, also with `ignore_eos`."""
    bad_words: Words | None = None
    """Words that are not generated."""
    ignore_eos: bool | None = None
    """Continue after the end-of-document token; false by default."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of texts; true by default."""
    return_token_ids: bool | None = None
    """Return token ids of prompt and answer, too; false by default."""
    return_weights_version: bool | None = None
    """Return the versions of the weights that made the tokens; false by default."""
    cache_salt: Name | None = None
    """Requests share cached prefixes with those of the same salt only."""
    explain_prefix_cache: bool | None = None
    """Explain why no more was skipped; with `--explain-prefix-cache`; false by default."""
    num_speculative_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most drafts of a step; 0 is off, the default is the server's."""
    cache_checkpoint: Checkpoints | None = None
    """Token positions after which other requests may go on differently."""

    # Metadata of the client, without effect on the output
    user: Name | None = None
    """Accepted without effect."""
    metadata: JsonObject | None = None
    """Accepted without effect."""
    store: bool | None = None
    """Store the answer: `/v1/responses` with `--responses-store-mb`; elsewhere without effect."""
    service_tier: Name | None = None
    """Accepted without effect."""
    safety_identifier: Name | None = None
    """Accepted without effect."""
    prompt_cache_key: Name | None = None
    """Accepted without effect."""
    prompt_cache_retention: Name | None = None
    """Accepted without effect."""


class GenerationRequest(SamplingFields):
    """Fields that completions and chat completions share. The client gets the first error in order."""

    # OpenAI's fields
    model: ModelName | None = None
    """Name of the served model, or its root."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Choices of each prompt; choice i has the seed `seed` + i; 1 by default."""
    stop: Word | Words | None = None
    """Words that end an answer; they are removed from it."""
    stream: bool | None = None
    """Send the answer in parts, as server-sent events; false by default."""
    stream_options: StreamOptions | None = None
    """Options of a stream."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens to generate; by default 16 for completions, as many as fit for chats."""
    return_routed_experts: bool | None = None
    """Return the experts of each token; with `--moe-enable-routing-replay`; false by default."""
    response_format: Form | None = None
    """Format of the answer: any text, JSON, or a JSON schema."""

    # Extension of this engine
    structured_outputs: StructuredOutputs | None = None
    """Format of the answer in vLLM's form; one of its fields."""

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream; set it or leave stream_options out")
        return self

    @field_validator("structured_outputs")
    @classmethod
    def _is_the_only_format(cls, value: StructuredOutputs | None, info: ValidationInfo) -> StructuredOutputs | None:
        if value is not None and info.data.get("response_format") is not None:
            raise ValueError("and response_format contradict each other; give one of them")
        return value

    @property
    def stop_words(self) -> tuple[str, ...]:
        """Return the stop words as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def enforced_format(self) -> ResponseFormat | None:
        """Return the response format, from either field; None if any text is allowed."""
        given = self.structured_outputs
        found = self.response_format if given is None else given.response_format
        return None if found is None or found.is_free else found
