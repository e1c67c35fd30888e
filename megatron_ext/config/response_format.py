"""Response format of structured output, as OpenAI's `response_format`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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

    @classmethod
    def parse(cls, text: str) -> ResponseFormat:
        """Parse command-line text: the JSON of a response format."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(cls.expected) from None
        return cls.of(value)

    @property
    def is_free(self) -> bool:
        """True if any text is allowed."""
        return self.kind == TEXT


def _check_fields(value: Mapping[object, object], known: set[str], kind: str) -> None:
    unknown = next((name for name, given in value.items() if name not in known and given is not None), None)
    if unknown is not None:
        raise ValueError(f"one with known fields: {kind} has {', '.join(sorted(known))}, and not {str(unknown)[:40]!r}")
