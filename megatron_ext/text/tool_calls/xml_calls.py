"""Calls as tags, with an argument in each: <function=weather> <parameter=city> Oslo </parameter> </function>.

    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

Texts are written as they are, other values as JSON. Which is which follows from the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from megatron_ext.text.tool_calls.functions import Function, GrammarRules
from megatron_ext.text.tool_calls.source import Arguments, CallBegun, NotACall, Parser, Source, json_text, overlap

_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"
_WORDS: Final = {"True": True, "False": False, "None": None}  # as templates in Python write them
_STRING: Final = frozenset({"string"})
_JSON_TYPES: Final[Mapping[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


@dataclass(frozen=True)
class XmlCalls:
    """Syntax of one call as tags."""

    def parse(self, source: Source, functions: dict[str, Function]) -> Parser:
        """Parse a call; texts are returned as they come."""
        yield from source.expect(_FUNCTION)
        name = (yield from source.until(">")).strip()
        if "\n" in name:
            raise NotACall("name")
        source.check_name(name)
        yield CallBegun(name)
        function = functions.get(name, Function(name))
        head = "{"
        while (yield from source.skip_spaces()) and (yield from source.starts_with(_PARAMETER)):
            key = (yield from source.until(">")).strip()
            yield Arguments(f"{head}{json_text(key)}: ")
            head = ", "
            yield from _value(source, _types(function.properties.get(key, {})))
        is_closed = yield from source.starts_with(_END_OF_FUNCTION)
        if is_closed or not source.has_ended:
            yield Arguments("{}" if head == "{" else "}")
        if not is_closed:
            raise NotACall(_END_OF_FUNCTION)

    def grammar(self, functions: list[Function], rules: GrammarRules, *, is_parallel: bool) -> str:
        """Return the expression of a call; arguments follow the function's schema, in the order of this."""
        calls = []
        for function in functions:
            arguments = [_argument(function, name, rules) for name in function.properties]
            head = rules.literal(f"{_FUNCTION}{function.name}>\n")
            calls.append(" ".join((head, *arguments, rules.literal(_END_OF_FUNCTION))))
        return f'"\\n" ({" | ".join(calls)}) "\\n"'


def _argument(function: Function, name: str, rules: GrammarRules) -> str:
    schema = function.schema_of(name)
    end = f"\n{_END_OF_PARAMETER}\n"
    texts = schema.get("enum", [schema.get("const")])
    if "string" not in _types(schema):
        value = f"{rules.json(schema)} {rules.literal(end)}"
    elif isinstance(texts, list) and texts != [None]:
        value = f"({' | '.join(rules.literal(_spelled(text)) for text in texts)}) {rules.literal(end)}"
    else:
        value = rules.string_up_to(end, schema)
    head = rules.literal(f"{_PARAMETER}{name}>\n")
    whole = rules.add(f"{head} {value}")
    return whole if name in function.required else f"{whole}?"


def _spelled(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _types(schema: Mapping[str, object]) -> frozenset[str]:
    """Return the JSON types that a schema names; a text if it names none."""
    found = schema.get("type")
    if isinstance(found, str):
        return frozenset({found})
    if isinstance(found, list):
        return frozenset(map(str, found))
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return frozenset().union(*(_types(one) for one in options if isinstance(one, dict))) or _STRING
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values and not any(isinstance(one, str) for one in values):
        return frozenset(_JSON_TYPES[type(one)] for one in values)
    return frozenset({"object"}) if "$ref" in schema or "properties" in schema else _STRING


def _value(source: Source, types: frozenset[str]) -> Parser:
    """Parse a value: without the line breaks around it."""
    if (yield from source.peek()) == "\n":
        source.position += 1
    if types != _STRING:
        text = yield from source.until(_END_OF_PARAMETER)
        yield Arguments(_typed(text.removesuffix("\n"), types))
        return
    yield Arguments('"')
    while True:
        rest = source.rest
        end = rest.find(_END_OF_PARAMETER)
        text = rest[:end].removesuffix("\n") if end >= 0 else rest[: len(rest) - _held(rest)]
        if text:
            yield Arguments(json_text(text)[1:-1])
        if end >= 0:
            source.position += end + len(_END_OF_PARAMETER)
            break
        source.position += len(text)
        if not (yield from source.more()):
            raise NotACall(_END_OF_PARAMETER)
    yield Arguments('"')


def _held(text: str) -> int:
    return overlap(text, "\n" + _END_OF_PARAMETER, _END_OF_PARAMETER)


def _typed(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that is not only a text by its schema: JSON, a word of Python, or the text itself."""
    try:
        value = _WORDS[text] if text in _WORDS else json.loads(text)
        written = json_text(value)
    except (ValueError, RecursionError):  # not JSON, or a number that JSON does not have
        return json_text(text)
    name = "string" if isinstance(value, str) else _JSON_TYPES[type(value)]
    is_named = name in types or (name == "integer" and "number" in types)
    return written if "string" not in types or (is_named and name != "string") else json_text(text)
