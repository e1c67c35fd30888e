"""Calls in Python's syntax: [weather(city="Oslo", days=2), time()]."""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_ext.text.tool_calls.functions import Function, GrammarRules
from megatron_ext.text.tool_calls.source import Arguments, CallBegun, NotACall, Parser, Part, Source, json_text

_OPENING, _CLOSING = "([{", ")]}"
_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}


@dataclass(frozen=True)
class PythonicCalls:
    """Syntax of calls as a Python list of calls with keyword arguments, whose values are literals."""

    def parse(self, source: Source, functions: dict[str, Function]) -> Parser:
        """Parse the list."""
        yield from source.expect("[")
        while True:
            yield from source.skip_spaces()
            yield from _call(source)
            source.settled = source.position
            if (yield from source.skip_spaces()) != ",":
                break
            source.position += 1
        yield from source.expect("]")

    def grammar(self, functions: list[Function], rules: GrammarRules, *, is_parallel: bool) -> str:
        """Return the expression of the calls; arguments follow the functions' schemas, in the order of these.

        Values are JSON, apart from the words of Python for single booleans and null.
        """
        calls = [
            f"{rules.literal(function.name + '(')} {_keywords(function, rules)} {rules.literal(')')}"
            for function in functions
        ]
        call = rules.add(" | ".join(calls))
        return f'"[" {call} (", " {call})* "]"' if is_parallel else f'"[" {call} "]"'


def _call(source: Source) -> Parser:
    """Parse a call, which begins with its first argument: until then it may be text."""
    name = yield from _name(source, "(")
    source.check_name(name)
    head = "{"
    while (yield from source.skip_spaces()) != ")":
        key = yield from _name(source, "=")
        if head == "{":
            yield CallBegun(name)
        value = yield from _value(source)
        yield Arguments(f"{head}{json_text(key)}: {json_text(value)}")
        head = ", "
        if (yield from source.skip_spaces()) == ",":
            source.position += 1
        elif (yield from source.peek()) != ")":
            raise NotACall(")")
    source.position += 1
    if head == "{":
        yield CallBegun(name)
    yield Arguments("{}" if head == "{" else "}")


def _name(source: Source, end: str) -> Part[str]:
    """Consume a name, and the character that ends it."""
    name = yield from source.word()
    yield from source.expect(end)
    if not name:
        raise NotACall("name")
    return name


def _value(source: Source) -> Part[Any]:
    """Consume a literal and return its value."""
    yield from source.skip_spaces()
    start, depth, quote, is_escaped = source.position, 0, "", False
    while True:
        char = yield from source.peek()
        if not char:
            raise NotACall("end")
        if quote:
            if char == quote and not is_escaped:
                quote = ""
            is_escaped = char == "\\" and not is_escaped
        elif char in "\"'":
            quote = char
        elif depth == 0 and char in ",)":
            return _literal(source.text[start : source.position].strip())
        else:
            depth += (char in _OPENING) - (char in _CLOSING)
        source.position += 1


def _literal(text: str) -> Any:
    """Return the value of a literal of Python, or of JSON, which models mix up; the text itself if it is neither."""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = read(text)
            json_text(value)
            return value
    return text


def _keywords(function: Function, rules: GrammarRules) -> str:
    """Return the expression of the arguments: all required ones, and any of the others, in order."""
    first, later = '""', '""'  # the rest of the arguments if none was written yet, and if one was
    for name in reversed(list(function.properties)):
        argument = f"{rules.literal(name + '=')} {_literal_of(function, name, rules)}"
        continued = rules.add(later)
        written = rules.add(f"{argument} {continued}")
        if name in function.required:
            first, later = written, f'", " {written}'
        else:
            first, later = f"{written} | {rules.add(first)}", f'", " {written} | {continued}'
    return rules.add(first)


def _literal_of(function: Function, name: str, rules: GrammarRules) -> str:
    schema = function.schema_of(name)
    found = schema.get("type")
    types = found if isinstance(found, list) else [found]
    words = [_WORDS[one] for one in types if one in _WORDS]
    others = [one for one in types if one not in _WORDS]
    if others:
        words.append(rules.json({**schema, "type": others} if words else schema))
    return f"({' | '.join(words)})"
