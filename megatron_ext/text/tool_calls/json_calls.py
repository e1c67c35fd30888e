"""Calls as JSON objects: {"name": "weather", "arguments": {"city": "Oslo"}}, alone or in a list; and Mistral's calls.

Mistral's models write weather[ARGS]{"city": "Oslo"}, or in older models a list of JSON objects.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from megatron_ext.text.tool_calls.functions import Function, GrammarRules
from megatron_ext.text.tool_calls.source import Arguments, BrokenArguments, CallBegun, NotACall, Parser, Part, Source

_ARGUMENT_KEYS = ("arguments", "parameters")
_BARE_KEYS = frozenset({"name", "type", "id", *_ARGUMENT_KEYS})  # of an object that is a call without a marker
_CONTAINERS = {"{": 1, "[": 1, "}": -1, "]": -1}
_STRING = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_BETWEEN = re.compile(r"[ \t\r\n:,]+")
_WORD = re.compile(r"[\w.+-]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}  # of Python, to JSON
_WORDS |= {word: f'"{word}"' for word in ("NaN", "Infinity", "-Infinity")}  # of which JSON has none


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

    def parse(self, source: Source, functions: dict[str, Function]) -> Parser:
        """Parse one object, or several."""
        if not self.is_list:
            yield from _call(source)
            while self.separator and (yield from _continues(source, self.separator.strip())):
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
    yield from source.skip_spaces()
    return (yield from source.starts_with(separator))


def _call(source: Source) -> Parser:
    """Parse an object; the call begins with its arguments, since an object without any may be none."""
    yield from source.expect("{")
    name: str | None = None
    held = "{}"  # arguments that are not a plain object after the name
    has_begun = has_arguments = False
    while (yield from source.skip_spaces()) != "}":
        key = yield from _text(source)
        if source.names is not None and not has_begun and key not in _BARE_KEYS:
            raise NotACall(key)
        yield from source.expect(":")
        first = yield from source.skip_spaces()
        if key == "name" and name is None:
            name = yield from _text(source)
            source.check_name(name)
        elif key in _ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            if first == "{" and name is not None:
                has_begun = True
                yield CallBegun(name)
                yield from json_arguments(source)
            else:
                held = _object((yield from _whole(source)))
        else:
            yield from _whole(source)
        if not (yield from _continues(source, ",")) and (yield from source.skip_spaces()) != "}":
            raise NotACall("}")
    source.position += 1
    if name is None:
        raise NotACall("name")
    if not has_begun:
        yield CallBegun(name)
        yield Arguments(held)
    source.settled = source.position


def json_arguments(source: Source) -> Parser:
    """Parse the arguments of a call that has begun.

    Raises:
        BrokenArguments: They do not continue as JSON.
    """
    try:
        yield from json_value(source)
    except NotACall as error:
        raise BrokenArguments(str(error)) from None
    source.settled = source.position


def _object(text: str) -> str:
    """Return the arguments that a value means: an object, its text in a string, or none.

    Raises:
        NotACall: The value is another one.
    """
    if text.startswith('"'):
        text = json.loads(text).strip()
    if text.startswith("{"):
        return text
    if text in ("", "null"):
        return "{}"
    raise NotACall("arguments")


def _text(source: Source) -> Part[str]:
    """Consume a string and return its value."""
    if (yield from source.skip_spaces()) != '"':
        raise NotACall('"')
    value = json.loads((yield from _whole(source)))
    assert isinstance(value, str), "it begins with a quote"
    return value


def _whole(source: Source) -> Part[str]:
    """Consume a value and return its JSON text."""
    pieces = []
    for piece in json_value(source):
        if isinstance(piece, Arguments):
            pieces.append(piece.text)
        else:
            yield piece
    return "".join(pieces)


class _ValueScanner:
    """Scanner that finds the end of a JSON value; it checks words, strings and brackets, not the whole grammar."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self.is_complete = False

    def take(self, text: str, start: int) -> tuple[str, int] | None:
        """Return the JSON of the next part of the text and the part's length; None where more text is needed.

        Words of Python become JSON, and `NaN` and infinity strings. In strings, control characters and backslashes
        that escape nothing are escaped.

        Raises:
            NotACall: The text cannot stand there.
        """
        char = text[start : start + 1]
        if not char or (self._in_string and _PARTIAL_ESCAPE.match(text, start)):
            return None
        if self._in_string:
            part = _STRING.match(text, start)
            if part is not None:
                return part[0], len(part[0])
            self._in_string = char != '"'
            self.is_complete = self._depth == 0 and not self._in_string
            return json.dumps(char)[1:-1] if self._in_string else char, 1
        word = _WORD.match(text, start)
        if word is not None and word.end() == len(text):  # the next piece of text may continue it
            return None
        self._in_string = char == '"'
        self._depth += _CONTAINERS.get(char, 0)
        self.is_complete = self._depth == 0 and not self._in_string
        if self._depth < 0:
            raise NotACall(char)
        if word is not None:
            return _WORDS.get(word[0], word[0]), len(word[0])
        if self._in_string or char in _CONTAINERS:
            return char, 1
        between = _BETWEEN.match(text, start)
        if between is None or self.is_complete:
            raise NotACall(char)
        return between[0], len(between[0])


def json_value(source: Source) -> Parser:
    """Yield the JSON text of a value in pieces.

    Raises:
        NotACall: The text is not JSON. What precedes the place has been yielded.
    """
    scanner = _ValueScanner()
    while not scanner.is_complete:
        pieces, problem = [], None
        try:
            while not scanner.is_complete and (taken := scanner.take(source.text, source.position)) is not None:
                pieces.append(taken[0])
                source.position += taken[1]
        except NotACall as error:
            problem = error
        if pieces:
            yield Arguments("".join(pieces))
        if problem is not None:
            raise problem
        if not scanner.is_complete and not (yield from source.more()):
            raise NotACall("end")


_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_LIST = JsonCalls(is_list=True)


@dataclass(frozen=True)
class MistralCalls:
    """Syntax of one call as a name and its arguments, or of a list of objects; both are read.

    Attributes:
        is_list: Whether the model writes a list.
    """

    is_list: bool = False

    def parse(self, source: Source, functions: dict[str, Function]) -> Parser:
        """Parse a call, or a list of calls. An id between name and arguments is dropped."""
        if (yield from source.skip_spaces()) == "[":
            yield from _LIST.parse(source, functions)
            return
        name = yield from source.word()
        if (yield from source.starts_with(_ID)):
            yield from source.word()
        yield from source.starts_with(_ARGUMENTS)
        if (yield from source.skip_spaces()) != "{":
            raise NotACall(name)
        source.check_name(name)
        yield CallBegun(name)
        yield from json_arguments(source)

    def grammar(self, functions: list[Function], rules: GrammarRules, *, is_parallel: bool) -> str:
        """Return the expression of a call or a list; arguments follow the functions' schemas."""
        if self.is_list:
            return _LIST.grammar(functions, rules, is_parallel=is_parallel)
        return " | ".join(
            f"{rules.literal(function.name)} {rules.marker(_ARGUMENTS)} {rules.json(function.schema)}"
            for function in functions
        )
