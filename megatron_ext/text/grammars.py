"""Grammar-constrained output: response formats compiled for a tokenizer by llguidance (the extra `grammar`).

A *matcher* follows the tokens of one output and computes the mask of its next token. The cost of a grammar is bounded,
during compilation and at each token, in the library's own units ("fuel"), so that no schema takes long. The library
releases the interpreter's lock while it compiles and while it computes a mask.

Parts of a tool's JSON schema that the library does not support are refused, or left out.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from megatron_ext.config.request import CHOICE, JSON_SCHEMA, LARK, REGEX, ResponseFormat
from megatron_ext.errors import ConfigError
from megatron_ext.text.matcher import BudgetMatcher, Matcher, short_reason
from megatron_ext.text.patterns import with_patterns
from megatron_ext.text.tokenizer import Tokenizer, ends_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer


MAX_COMPILED = 64  # grammars cached for later requests with equal response formats
_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")  # escapes as `json.dumps` writes them
_INDENT = 4  # spaces before an expression that the library shows
_REGEX_ERROR = re.compile(r"regex parse error:\n[^\n]*\n(?P<before> *)\^[ ^]*\nerror: (?P<reason>[^\n]*)")
_ANY_OBJECT = '{"type": "object"}'
DEFINITIONS = ("$defs", "definitions")
# At most one space between the parts of JSON: a small model could generate blanks up to its limit.
# A property name with an escaped letter would be taken for another property.
JSON_OPTIONS = {
    "whitespace_pattern": " ?",
    "json_allowed_escapes": 'bfnrt"\\',
    "lenient": False,
    "coerce_one_of": False,
}
# At most about 20 ms to compile, 20 ms a token and 40 MB a matcher; a tenth of the library's defaults.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,  # they would quote outputs, which must not be logged
}


class Grammars:
    """Compiler of response formats for one model; thread-safe.

    Args:
        tokenizer: Tokenizer of the model.
        model_size: Vocabulary size of the model, padding included.
    """

    def __init__(self, tokenizer: Tokenizer, model_size: int) -> None:
        self._given = tokenizer
        self._model_size = model_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[ResponseFormat, Matcher] = OrderedDict()

    def check(self, response_format: ResponseFormat | None) -> None:
        """Compile a response format, or report why it cannot be satisfied.

        Raises:
            ConfigError: The library or a readable tokenizer is missing, or the response format has features that the
                library lacks; the error names them.
        """
        if response_format is not None:
            self._compile(response_format)

    def matcher(self, response_format: ResponseFormat) -> Matcher:
        """Return a matcher of an empty answer, whose mask is known; errors as of `check`."""
        matcher = self._compile(response_format).copy()
        if response_format.thinking is None:
            return matcher
        encode = getattr(self._given, "tokenize_plain", self._given.tokenize)
        closing = encode(response_format.thinking.closing)
        decode = functools.partial(self._given.detokenize, skip_special_tokens=False)
        return BudgetMatcher(matcher, response_format.thinking, closing, decode)

    def _compile(self, response_format: ResponseFormat) -> Matcher:
        response_format = dataclasses.replace(response_format, thinking=None)
        with self._lock:
            if response_format in self._compiled:
                self._compiled.move_to_end(response_format)
                return self._compiled[response_format]
        compiled = self._compile_anew(response_format)
        with self._lock:
            self._compiled[response_format] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _compile_anew(self, response_format: ResponseFormat) -> Matcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        if response_format.kind in (JSON_SCHEMA, LARK) and _CONTROL.search(response_format.source):
            raise _refused(response_format, "it has a control character, which cannot be generated")
        try:
            if response_format.kind == REGEX:
                grammar = LLMatcher.grammar_from_regex(response_format.source)
            elif response_format.kind == CHOICE:
                texts = map(json.dumps, json.loads(response_format.source))  # strings are written as in JSON
                grammar = LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
            elif response_format.kind == LARK:
                grammar = LLMatcher.grammar_from_lark(response_format.source)
            else:
                schema = response_format.source if response_format.kind == JSON_SCHEMA else _ANY_OBJECT
                if '"pattern' in schema:
                    schema = json.dumps(with_patterns(json.loads(schema)), ensure_ascii=False)
                grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        except ValueError as error:
            raise _refused(response_format, str(error)) from None
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        begun = matcher.deep_copy()  # its cached grammar states would be part of each copy
        started = time.thread_time()
        mask = begun.compute_bitmask()
        if not matcher.is_error() and not begun.is_error():  # the second one if no token may come first
            return Matcher(matcher, tokenizer, self._model_size, mask, time.thread_time() - started)
        raise _refused(response_format, matcher.get_error() or "no output satisfies it")

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Return the library's view of the vocabulary.

        Raises:
            ConfigError: The tokenizer has none.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise ConfigError(
                "response_format, required and strict tools and thinking_budget_tokens need the package llguidance, "
                "which is not installed; install the extra [grammar]"
            )
        serialized = getattr(self._given, "serialized", None)
        ends = ends_of(self._given)
        if serialized is None or not ends:
            raise ConfigError(
                "guided output is not supported for this model: it needs a fast tokenizer of Hugging Face with an "
                "end-of-text token"
            )
        from llguidance import LLTokenizer

        try:
            ids = max(self._model_size, self._given.vocab_size)
            return LLTokenizer(serialized, n_vocab=ids, eos_token=ends[0])
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                f"guided output: the library llguidance cannot read the model's tokenizer: {short_reason(str(error))}"
            ) from error


def _refused(response_format: ResponseFormat, reason: str) -> ConfigError:
    shown = short_reason(compilation_reason(reason))
    if (
        response_format.kind == LARK
    ):  # the schemas are supported one by one; the library shows lines of the grammar after a reason
        shown = short_reason(compilation_reason(reason).partition("\n")[0])
        return ConfigError(f"tools: the grammar of the calls is not supported: {shown}")
    return ConfigError(f"response_format: the {response_format.kind} is not supported: {shown}")


def compilation_reason(text: str) -> str:
    """Return a reason of the library without its own grammar around an expression, and without its drawing."""
    drawn = _REGEX_ERROR.search(text)
    if drawn is not None:
        return f"{drawn['reason']}, at character {len(drawn['before']) - _INDENT + 1} of the expression"
    _, _, inner = text.rpartition("(in regex): ")
    return inner.partition(" in regex /")[0]


def supported_part(schema: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    """Return a schema that the library can follow, and its reason against the whole; empty if it can follow that.

    The library ignores keywords that it does not have. An argument whose schema it refuses may have any value.
    A schema without a type is of an object, as all arguments are.
    """
    return _supported_part(json.dumps(schema))


@lru_cache(MAX_COMPILED)
def _supported_part(source: str) -> tuple[Mapping[str, Any], str]:
    schema = {"type": "object", **json.loads(source)}
    reason = _schema_error(schema)
    if not reason or not _schema_error(schema, is_lenient=True):
        return schema, reason
    properties = schema.get("properties")
    if isinstance(properties, dict):
        shared = {"type": "object"} | {key: schema[key] for key in DEFINITIONS if key in schema}
        kept = dict(properties)
        for name, one in properties.items():
            if _schema_error({**shared, "properties": {name: one}, "required": [name]}, is_lenient=True):
                kept[name] = {}
        schema = {**schema, "properties": kept}
    return {"type": "object"} if _schema_error(schema, is_lenient=True) else schema, reason


def _schema_error(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """Return the library's reason against a schema; empty if it is supported, or if its other parts are."""
    from llguidance import LLMatcher

    source, options = json.dumps(with_patterns(schema)), {**JSON_OPTIONS, "lenient": is_lenient}
    grammar = LLMatcher.grammar_from_json_schema(source, overrides=options)  # type: ignore[arg-type]
    reason = compilation_reason(LLMatcher.validate_grammar(grammar)).partition("\n")[0]
    return reason.partition(":  (")[0]  # an expression of the library's own follows
