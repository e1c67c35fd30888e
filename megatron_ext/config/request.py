"""Parameters of one request, logit biases and the response format among them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.config.annotations import require_types
from megatron_ext.config.options import option, require, require_options

LARGEST_BIAS = 100.0


class TokenBiases(tuple[tuple[int, float], ...]):
    """Pairs of a token id and the bias added to its logit, in order of the ids; empty for no bias."""

    expected: ClassVar[str] = 'an object of token ids and numbers, as in {"17": -100, "4": 2.5}'

    @classmethod
    def of(cls, value: object) -> TokenBiases:
        """Convert a JSON object with ids as strings, a mapping with ids as keys, or a list of pairs.

        Raises:
            ValueError: The value has another form.
        """
        if not isinstance(value, Mapping | list | tuple):
            raise ValueError(cls.expected)
        pairs = value.items() if isinstance(value, Mapping) else value
        try:
            biases = {_token_id(token): _number(bias) for token, bias in pairs}
        except TypeError:
            raise ValueError(cls.expected) from None
        return cls(sorted(biases.items()))

    @property
    def problem(self) -> str | None:
        """Message on the first bias that is out of bounds; None if all are valid."""
        for token, bias in self:
            if not math.isfinite(bias) or abs(bias) > LARGEST_BIAS:
                return f"bias {bias:g} of token {token} must be between -{LARGEST_BIAS:g} and {LARGEST_BIAS:g}"
        return None


NO_BIASES = TokenBiases()


def _token_id(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    if type(value) is int and value >= 0:
        return value
    raise ValueError(TokenBiases.expected)


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise ValueError(TokenBiases.expected)
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError(TokenBiases.expected) from None


TEXT, JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE = "text", "json_object", "json_schema", "regex", "choice"
LARK = "lark"  # a grammar of ours, which clients cannot give
KINDS = (TEXT, JSON_OBJECT, JSON_SCHEMA, REGEX, CHOICE)
# Fields beside `type`. A schema in `json_object` is llama.cpp's form.
_FIELDS = {JSON_OBJECT: {"schema"}, JSON_SCHEMA: {"json_schema"}, REGEX: {"regex"}, CHOICE: {"choice"}}
_SCHEMA_FIELDS = {"name", "description", "schema", "strict"}  # of OpenAI's `json_schema`; all schemas are strict


@dataclass(frozen=True)
class ThinkingBudget:
    """Budget of the thinking that an output may begin with.

    Attributes:
        tokens: Maximum number of tokens before the marker that ends thinking.
        closing: Marker that ends thinking.
        opening: Marker that begins thinking; None if the output begins inside of it.
    """

    tokens: int
    closing: str
    opening: str | None = None


@dataclass(frozen=True)
class ResponseFormat:
    """Format of an output: any text, a JSON object, JSON of a schema, a match of an expression, or a text of a list.

    Attributes:
        kind: One of `KINDS`, or `LARK`.
        source: Schema as JSON, with its keys in the given order, the regular expression, the list as JSON, or the
            grammar of an answer with tool calls or thinking.
        thinking: Budget of thinking; None without one.
    """

    kind: str
    source: str = ""
    thinking: ThinkingBudget | None = None

    expected: ClassVar[str] = (
        'a response format, as in {"type": "json_object"}, '
        '{"type": "json_schema", "json_schema": {"schema": {...}}}, {"type": "regex", "regex": "[a-z]+"} or '
        '{"type": "choice", "choice": ["yes", "no"]}'
    )

    @classmethod
    def of(cls, value: object) -> ResponseFormat:
        """Convert a JSON value.

        Raises:
            ValueError: The value is not a response format; the text follows "is not".
        """
        if isinstance(value, ResponseFormat):
            return value
        if not isinstance(value, Mapping) or value.get("type") not in KINDS:
            raise ValueError(cls.expected)
        kind = str(value["type"])
        _check_fields(value, {"type"} | _FIELDS.get(kind, set()), kind)
        if kind == REGEX:
            return cls.regex(value.get("regex"))
        if kind == CHOICE:
            return cls.choice(value.get("choice"))
        if kind == JSON_SCHEMA:
            named = value.get("json_schema")
            if not isinstance(named, Mapping):
                return cls.json_schema(None)
            _check_fields(named, _SCHEMA_FIELDS, kind)
            return cls.json_schema(named.get("schema"))
        if value.get("schema") is not None:
            return cls.json_schema(value["schema"])
        return cls(kind)

    @classmethod
    def json_schema(cls, schema: object) -> ResponseFormat:
        """Build the format of JSON with a schema; errors as in `of`."""
        if not isinstance(schema, Mapping):
            raise ValueError('one with a schema, as in {"type": "json_schema", "json_schema": {"schema": {...}}}')
        try:
            return cls(JSON_SCHEMA, json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            raise ValueError("one with a schema that is JSON") from None

    @classmethod
    def regex(cls, expression: object) -> ResponseFormat:
        """Build the format of text that matches a regular expression; errors as in `of`."""
        if not isinstance(expression, str) or not expression:
            raise ValueError('one with an expression, as in {"type": "regex", "regex": "[a-z]+"}')
        return cls(REGEX, expression)

    @classmethod
    def choice(cls, texts: object) -> ResponseFormat:
        """Build the format of one of several texts; errors as in `of`."""
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError('one with texts, as in {"type": "choice", "choice": ["yes", "no"]}')
        return cls(CHOICE, json.dumps(texts, ensure_ascii=False))

    @property
    def is_free(self) -> bool:
        """True if any text is allowed."""
        return self.kind == TEXT


def _check_fields(value: Mapping[object, object], known: set[str], kind: str) -> None:
    unknown = next((name for name, given in value.items() if name not in known and given is not None), None)
    if unknown is not None:
        raise ValueError(f"one with known fields: {kind} has {', '.join(sorted(known))}, and not {str(unknown)[:40]!r}")


LARGEST_PENALTY = 2.0  # presence and frequency penalties, as OpenAI's
LARGEST_FACTOR = 100.0  # repetition penalty, or its inverse
MAX_CHECKPOINTS = 64


@dataclass(frozen=True)
class RequestParams:
    """Sampling parameters, stop conditions and log-prob options of a request. Greedy by default; docs/sampling.md."""

    # Length. 0 generated tokens: the prompt is only computed, and scored if requested.
    num_tokens_to_generate: int = option(30, "Maximum number of tokens to generate")
    min_tokens: int = 0  # until then neither an end token nor a stop word ends the generation

    # Filters and draw of a token; `top_k` 1 is greedy, too
    temperature: float = option(
        0.0,
        "Sampling temperature; 0: greedy",
        minimum=0,
        bounds="zero (greedy) or more",
        in_generation_config=True,
    )
    top_k: int = option(
        0,
        "Sample from the k most likely tokens; 0: off, 1: greedy",
        flag="--top_k",
        minimum=0,
        bounds="zero (off) or more",
        in_generation_config=True,
    )
    top_p: float = option(
        0.0,
        "Sample from the smallest set of most likely tokens with at least this total probability; 0: off",
        flag="--top_p",
        minimum=0,
        maximum=1,
        bounds="between 0 (off) and 1",
        in_generation_config=True,
    )
    min_p: float = option(
        0.0,
        "Sample from tokens with at least this fraction of the most likely token's probability; 0: off",
        flag="--min_p",
        minimum=0,
        maximum=1,
        bounds="between 0 (off) and 1",
        in_generation_config=True,
    )

    # Logits. The first two are subtracted from logits of generated tokens. The third divides positive logits of prompt
    # and output tokens, and multiplies negative ones.
    presence_penalty: float = option(
        0.0,
        "Subtract this from the logits of tokens generated so far; 0: off",
        minimum=-LARGEST_PENALTY,
        maximum=LARGEST_PENALTY,
        bounds=f"between -{LARGEST_PENALTY:g} and {LARGEST_PENALTY:g}; 0 is off",
    )
    frequency_penalty: float = option(
        0.0,
        "Subtract this from a token's logit for each time that the token was generated; 0: off",
        minimum=-LARGEST_PENALTY,
        maximum=LARGEST_PENALTY,
        bounds=f"between -{LARGEST_PENALTY:g} and {LARGEST_PENALTY:g}; 0 is off",
    )
    repetition_penalty: float = option(
        1.0,
        "Divide positive logits of the prompt's and generated tokens by this, and multiply negative ones; 1: off",
        minimum=1 / LARGEST_FACTOR,
        maximum=LARGEST_FACTOR,
        bounds=f"between {1 / LARGEST_FACTOR:g} and {LARGEST_FACTOR:g}; 1 is off",
        in_generation_config=True,
    )
    logit_bias: TokenBiases = option(
        NO_BIASES, "Numbers to add to the logits of tokens: a JSON object by token id", metavar="JSON"
    )
    bad_words: tuple[str, ...] = option((), "Words that must not be generated")
    response_format: ResponseFormat | None = option(  # default: any text
        None, "Format that outputs must have: OpenAI's response_format, or a regex; default: any text", metavar="JSON"
    )
    seed: int | None = None  # default: derived from the run's seed and the request id

    # Log-probs
    return_log_probs: bool = option(False, "Return log-probs of the prompt's and the generated tokens")
    skip_prompt_log_probs: bool = option(False, "With --return-log-probs: omit log-probs of the prompt")
    top_n_logprobs: int = option(0, "With --return-log-probs: number of most likely tokens to return at each position")

    # End and text. `stop_token_ids` end a generation even with `ignore_eos`.
    stop_words: tuple[str, ...] = option((), "Words that end a generation; they are removed from the text")
    stop_token_ids: tuple[int, ...] = option(
        (), "Token ids that end a generation in addition to the end-of-document token, even with --ignore-eos"
    )
    # Default: the tokenizer's end-of-document, and the others of generation_config.json
    termination_id: int | None = option(
        None, "Token id that ends a generation; default: the end-of-document tokens", metavar="ID"
    )
    ignore_eos: bool = option(False, "Continue after an end-of-document token")
    skip_special_tokens: bool = option(True, "Remove special tokens from texts")
    detokenize_stop_sequence: bool = False  # keep the stop word, and the end token if it has a text, in the text

    # Prefix cache and drafts
    cache_salt: str | None = None
    enable_prefix_caching: bool = True
    num_speculative_tokens: int | None = None  # maximum drafts per step; 0 is off; default: the engine's
    cache_checkpoint: tuple[int, ...] = ()  # positions where other requests may diverge from the prompt

    track_generated_token_events: bool = option(
        False,
        "With --output-request-events: record an event for each generated token",
        flag="--inference-dynamic-batching-track-generated-token-events",
    )

    def __post_init__(self) -> None:
        for name in ("stop_words", "bad_words"):
            words = getattr(self, name)
            require(not isinstance(words, str), f"{name} {words!r} is one text; give a list of them")
        require_types(self)
        if self.response_format is not None and self.response_format.is_free:
            object.__setattr__(self, "response_format", None)
        self._check_counts()
        require_options(self, by_flag=False)
        self._check_logits()
        self._check_checkpoints()
        require(all(self.stop_words), "a stop word is empty; leave it out")
        require(all(word.strip() for word in self.bad_words), "a bad word is empty; leave it out")
        require(
            all(token >= 0 for token in self.stop_token_ids),
            f"stop_token_ids {min(self.stop_token_ids, default=0)}: token ids are zero or more",
        )

    def _check_checkpoints(self) -> None:
        positions = self.cache_checkpoint
        minimum = min(positions, default=1)
        require(minimum > 0, f"cache_checkpoint {minimum}: positions are numbers of tokens from the start, 1 or more")
        require(
            len(positions) <= MAX_CHECKPOINTS,
            f"cache_checkpoint has {len(positions)} positions, and must have at most {MAX_CHECKPOINTS}",
        )

    def _check_counts(self) -> None:
        count, fewest, n = self.num_tokens_to_generate, self.min_tokens, self.top_n_logprobs
        require(count >= 0, f"num_tokens_to_generate {count} must be zero (only the prompt is computed) or more")
        require(
            0 <= fewest <= count,
            f"min_tokens {fewest} must be between 0 and num_tokens_to_generate, which is {count}",
        )
        require(n >= 0, f"top_n_logprobs {n} must be zero (off) or more")
        drafts = self.num_speculative_tokens
        require(drafts is None or drafts >= 0, f"num_speculative_tokens {drafts} must be zero (off) or more")
        require(
            n == 0 or self.return_log_probs,
            f"top_n_logprobs {n} needs return_log_probs; set it or leave top_n_logprobs out",
        )

    def _check_logits(self) -> None:
        problem = self.logit_bias.problem
        require(problem is None, f"logit_bias: {problem}")
        require(
            self.response_format is None or not self.min_tokens,
            f"min_tokens {self.min_tokens} and response_format contradict each other: the form says where the answer "
            "may end; give one of them",
        )

    @property
    def is_greedy(self) -> bool:
        """True if the best token is taken, without randomness."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def wants_prompt_log_probs(self) -> bool:
        """True if the log-probs of the prompt tokens are requested."""
        return self.return_log_probs and not self.skip_prompt_log_probs

    @property
    def has_penalties(self) -> bool:
        """True if penalties change logits depending on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def processes_logits(self) -> bool:
        """True if logits processors are needed before temperature, top_k and top_p."""
        is_cut = self.min_p > 0 and not self.is_greedy
        return self.has_penalties or is_cut or bool(self.logit_bias or self.bad_words or self.response_format)
