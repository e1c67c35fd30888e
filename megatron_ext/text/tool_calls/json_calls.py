"""Calls as JSON objects: {"name": "weather", "arguments": {"city": "Oslo"}}, alone or in a list."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from megatron_ext.text.tool_calls.events import Arguments, CallBegun
from megatron_ext.text.tool_calls.functions import Function, GrammarRules
from megatron_ext.text.tool_calls.source import NotACall, Parser, Part, Source

_ARGUMENT_KEYS = ("arguments", "parameters")
_CONTAINERS = {"{": 1, "[": 1, "}": -1, "]": -1}
_OUTSIDE = frozenset(':,+-."')  # characters of JSON outside of strings, beside letters, digits, spaces and containers


@dataclass(frozen=True)
class JsonCalls:
    """Syntax of calls as JSON objects.

    Attributes:
        key: Key of the arguments that the model writes; both usual ones are read.
        is_list: Whether the calls are in one list.
        separator: Text between objects that are not in a list; empty if there is one only.
        space: White space before and after the calls.
    """

    key: str = "arguments"
    is_list: bool = False
    separator: str = ""
    space: str = ""

    is_json: ClassVar[bool] = True

    def parse(self, source: Source, functions: dict[str, Function]) -> Parser:
        """Parse one object, or several."""
        if not self.is_list:
            yield from _call(source)
            while self.separator and (yield from _continues(source, self.separator)):
                yield from _call(source)
            return
        yield from source.expect("[")
        yield from _call(source)
        while (yield from _continues(source, ",")):
            yield from _call(source)
        yield from source.expect("]")

    def grammar(self, functions: list[Function], rules: GrammarRules, *, is_parallel: bool) -> str:
        """Return the expression of the calls; arguments follow the functions' schemas."""
        calls = []
        for function in functions:
            head = f'{{"name": {json.dumps(function.name)}, "{self.key}": '
            calls.append(f'{rules.literal(head)} {rules.json(function.schema)} "}}"')
        call = rules.add(" | ".join(calls))
        separator = ", " if self.is_list else self.separator
        several = f"{call} ({rules.literal(separator)} {call})*" if separator and is_parallel else call
        inner = f'"[" {several} "]"' if self.is_list else several
        return f"{rules.literal(self.space)} {inner} {rules.literal(self.space)}" if self.space else inner


def _continues(source: Source, separator: str) -> Part[bool]:
    start = source.position
    yield from source.skip_spaces()
    if (yield from source.starts_with(separator)):
        return True
    source.position = start
    return False


def _call(source: Source) -> Parser:
    """Parse an object; the call begins with its arguments, since an object without any may be none."""
    yield from source.expect("{")
    name: str | None = None
    held: str | None = None  # arguments that precede the name
    has_arguments = False
    while (yield from source.skip_spaces()) != "}":
        key = yield from _text(source)
        yield from source.expect(":")
        first = yield from source.skip_spaces()
        if key == "name":
            name = yield from _text(source)
        elif key in _ARGUMENT_KEYS and not has_arguments:
            if first != "{":
                raise NotACall(key)
            has_arguments = True
            if name is None:
                held = yield from _whole(source)
            else:
                yield CallBegun(name)
                yield from _arguments(source)
        else:
            yield from _whole(source)
        if not (yield from _continues(source, ",")) and (yield from source.skip_spaces()) != "}":
            raise NotACall("}")
    source.position += 1
    if name is None:
        raise NotACall("name")
    if held is not None or not has_arguments:
        yield CallBegun(name)
        yield Arguments(held or "{}")


def _arguments(source: Source) -> Parser:
    for piece in _pieces(source):
        yield None if piece is None else Arguments(piece)


def _text(source: Source) -> Part[str]:
    """Consume a string and return its value."""
    yield from source.skip_spaces()
    if (yield from source.peek()) != '"':
        raise NotACall('"')
    try:
        value = json.loads((yield from _whole(source)))
    except ValueError:
        raise NotACall("string") from None
    assert isinstance(value, str), "it begins with a quote"
    return value


def _whole(source: Source) -> Part[str]:
    """Consume a value and return its JSON text."""
    pieces = []
    for piece in _pieces(source):
        if piece is None:
            yield None
        else:
            pieces.append(piece)
    return "".join(pieces)


class _ValueScanner:
    """Scanner that finds the end of a JSON value; it checks characters, not the whole grammar."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_begun = False

    def ends_before(self, char: str) -> bool:
        """Return whether the value has ended before `char`: a number or a word."""
        return self._has_begun and not self._in_string and self._depth == 0 and (char in ",]}" or char.isspace())

    def take(self, char: str) -> bool:
        """Take the next character; return whether the value ends with it.

        Raises:
            NotACall: The character cannot stand there.
        """
        self._has_begun = True
        if self._in_string:
            self._in_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
            return not self._in_string and self._depth == 0
        if char in _CONTAINERS:
            self._depth += _CONTAINERS[char]
            return self._depth <= 0
        if not (char.isspace() or char.isalnum() or char in _OUTSIDE):
            raise NotACall(char)
        self._in_string = char == '"'
        return False


def _pieces(source: Source) -> Generator[str | None, None, None]:
    """Yield the JSON text of a value in pieces, and None where more text is needed.

    Raises:
        NotACall: The text is not JSON. What precedes the place has been yielded.
    """
    scanner = _ValueScanner()
    is_complete, problem = False, None
    while not is_complete and problem is None:
        start = source.position
        while not is_complete and problem is None and source.position < len(source.text):
            char = source.text[source.position]
            is_complete = scanner.ends_before(char)
            if is_complete:
                break
            try:
                is_complete = scanner.take(char)
            except NotACall as error:
                problem = error
                break
            source.position += 1
        if start < source.position:
            yield source.text[start : source.position]
        if not is_complete and problem is None:
            if source.is_last:
                raise NotACall("end")
            yield None
    if problem is not None:
        raise problem
