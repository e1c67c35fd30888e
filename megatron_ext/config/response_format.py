"""The form that an answer must have, as OpenAI's `response_format` says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

TEXT, JSON_OBJECT, JSON_SCHEMA, REGEX = "text", "json_object", "json_schema", "regex"
KINDS = (TEXT, JSON_OBJECT, JSON_SCHEMA, REGEX)


@dataclass(frozen=True)
class ResponseFormat:
    """A form: any text, any JSON object, JSON of a schema, or text that matches a regular expression as a whole.

    Attributes:
        kind: One of `KINDS`.
        source: The schema as JSON, in the order in which it was written, or the expression.
    """

    kind: str
    source: str = ""

    expected: ClassVar[str] = (
        'a response format, as in {"type": "json_object"}, '
        '{"type": "json_schema", "json_schema": {"schema": {...}}} or {"type": "regex", "regex": "[a-z]+"}'
    )

    @classmethod
    def of(cls, value: object) -> ResponseFormat:
        """As JSON says it.

        Raises:
            ValueError: What it is not, to follow "is not".
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
        """JSON of a schema; errors as of `of`."""
        if not isinstance(schema, Mapping):
            raise ValueError('one with a schema, as in {"type": "json_schema", "json_schema": {"schema": {...}}}')
        try:
            return cls(JSON_SCHEMA, json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            raise ValueError("one with a schema that is JSON") from None

    @classmethod
    def regex(cls, expression: object) -> ResponseFormat:
        """Text that matches; errors as of `of`."""
        if not isinstance(expression, str) or not expression:
            raise ValueError('one with an expression, as in {"type": "regex", "regex": "[a-z]+"}')
        return cls(REGEX, expression)

    @classmethod
    def parse(cls, text: str) -> ResponseFormat:
        """As a person types it: the same in JSON."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(cls.expected) from None
        return cls.of(value)

    @property
    def is_free(self) -> bool:
        """Whether any text has it."""
        return self.kind == TEXT
