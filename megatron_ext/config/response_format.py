"""Response format of structured output, as OpenAI's `response_format`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

TEXT, JSON_OBJECT, JSON_SCHEMA, REGEX = "text", "json_object", "json_schema", "regex"
KINDS = (TEXT, JSON_OBJECT, JSON_SCHEMA, REGEX)


@dataclass(frozen=True)
class ResponseFormat:
    """Format of an output: any text, a JSON object, JSON of a schema, or a full match of a regular expression.

    Attributes:
        kind: One of `KINDS`.
        source: Schema as JSON, with its keys in the given order, or the regular expression.
    """

    kind: str
    source: str = ""

    expected: ClassVar[str] = (
        'a response format, as in {"type": "json_object"}, '
        '{"type": "json_schema", "json_schema": {"schema": {...}}} or {"type": "regex", "regex": "[a-z]+"}'
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
        if kind == REGEX:
            return cls.regex(value.get("regex"))
        if kind == JSON_SCHEMA:
            named = value.get("json_schema")
            return cls.json_schema(named.get("schema") if isinstance(named, Mapping) else None)
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
