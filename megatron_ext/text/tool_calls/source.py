"""Growing text that the parsers of call syntaxes read, and the events that they yield.

A parser is a generator. It yields events, and None where it needs more text; `Source.add` brings that before the
generator is resumed. At the end of the text `peek` returns an empty string.
"""

from __future__ import annotations

import json
from collections.abc import Container, Generator
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """Beginning of a call; the arguments follow in `Arguments`."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """Next piece of the JSON text of the latest call's arguments."""

    text: str


Event = Content | CallBegun | Arguments


Result = TypeVar("Result")
# Generator type of a parser's part, which returns a result.
Part = Generator[Event | None, None, Result]
Parser = Generator[Event | None, None, Any]


class NotACall(ValueError):
    """The text does not continue as a call."""


class BrokenArguments(NotACall):
    """The arguments do not continue as JSON."""


class Source:
    """Text so far, and the position of the parser in it.

    Attributes:
        names: Names that a call may have; None for any.
        has_ended: Whether the parser needed more text than there is.
        settled: Position after the latest whole call.
    """

    def __init__(self) -> None:
        self.names: Container[str] | None = None
        self.text = ""
        self.position = 0
        self.settled = 0
        self.is_last = False
        self.has_ended = False

    def add(self, text: str, *, is_last: bool) -> None:
        """Append text; `is_last` if none follows."""
        self.text += text
        self.is_last = is_last

    @property
    def rest(self) -> str:
        """Text that has not been parsed."""
        return self.text[self.position :]

    def more(self) -> Part[bool]:
        """Wait for more text; return False at the end."""
        if not self.is_last:
            yield None
            return True
        self.has_ended = True
        return False

    def peek(self) -> Part[str]:
        """Return the next character, which is not consumed; empty at the end."""
        while self.position >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.position]

    def skip_spaces(self) -> Part[str]:
        """Consume white space; return the next character, as `peek`."""
        while (char := (yield from self.peek())).isspace():
            self.position += 1
        return char

    def word(self) -> Part[str]:
        """Consume letters, digits, and what else names have; return them."""
        start = self.position
        while (char := (yield from self.peek())) and (char.isalnum() or char in "_.-"):
            self.position += 1
        return self.text[start : self.position]

    def starts_with(self, literal: str) -> Part[bool]:
        """Return whether the text continues with `literal`; consume it if so."""
        while True:
            found = self.text[self.position : self.position + len(literal)]
            if found == literal:
                self.position += len(literal)
                return True
            if not literal.startswith(found) or not (yield from self.more()):
                return False

    def expect(self, literal: str) -> Part[None]:
        """Consume white space and `literal`.

        Raises:
            NotACall: The text continues otherwise.
        """
        yield from self.skip_spaces()
        if not (yield from self.starts_with(literal)):
            raise NotACall(literal)

    def until(self, literal: str) -> Part[str]:
        """Consume the text up to `literal`, and `literal`; return the text before it.

        Raises:
            NotACall: The text ends before.
        """
        searched = self.position
        while (end := self.text.find(literal, searched)) < 0:
            searched = max(self.position, len(self.text) - len(literal) + 1)
            if not (yield from self.more()):
                raise NotACall(literal)
        found = self.text[self.position : end]
        self.position = end + len(literal)
        return found

    def skip_closing(self, closing: str) -> Part[None]:
        """Consume the closing marker, white space and needless brackets before it, if they follow; else nothing."""
        start = self.position
        while closing and (char := (yield from self.peek())) and (char.isspace() or char in "]}"):
            self.position += 1
        if not closing or not (yield from self.starts_with(closing)):
            self.position = start

    def check_name(self, name: str) -> None:
        """Check the name of a call.

        Raises:
            NotACall: It is empty, cannot be sent, or names no function that may be called.
        """
        if not name or not _is_unicode(name) or not (self.names is None or name in self.names):
            raise NotACall(name)


def json_text(value: object) -> str:
    """Return the JSON text of a value, which can be sent: lone surrogates stay escaped.

    Raises:
        ValueError: JSON has no such number.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _is_unicode(text) else json.dumps(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def overlap(text: str, *markers: str) -> int:
    """Return the number of characters at the end of `text` that may begin one of the markers."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0
