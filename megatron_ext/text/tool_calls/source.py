"""Growing text that the parsers of call syntaxes read.

A parser is a generator. It yields events, and None where it needs more text; `Source.add` brings that before the
generator is resumed. At the end of the text `peek` returns an empty string.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from megatron_ext.text.tool_calls.events import Event

Result = TypeVar("Result")
# Generator type of a parser's part, which returns a result.
Part = Generator[Event | None, None, Result]
Parser = Generator[Event | None, None, Any]


class NotACall(ValueError):
    """The text does not continue as a call."""


class Source:
    """Text so far, and the position of the parser in it."""

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.is_last = False

    def add(self, text: str, *, is_last: bool) -> None:
        """Append text; `is_last` if none follows."""
        self.text += text
        self.is_last = is_last

    @property
    def rest(self) -> str:
        """Text that has not been parsed."""
        return self.text[self.position :]

    def peek(self) -> Part[str]:
        """Return the next character, which is not consumed; empty at the end."""
        while self.position >= len(self.text):
            if self.is_last:
                return ""
            yield None
        return self.text[self.position]

    def skip_spaces(self) -> Part[str]:
        """Consume white space; return the next character, as `peek`."""
        while (char := (yield from self.peek())).isspace():
            self.position += 1
        return char

    def starts_with(self, literal: str) -> Part[bool]:
        """Return whether the text continues with `literal`; consume it if so."""
        while True:
            found = self.text[self.position : self.position + len(literal)]
            if found == literal:
                self.position += len(literal)
                return True
            if self.is_last or not literal.startswith(found):
                return False
            yield None

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
            if self.is_last:
                raise NotACall(literal)
            searched = max(self.position, len(self.text) - len(literal) + 1)
            yield None
        found = self.text[self.position : end]
        self.position = end + len(literal)
        return found

    def skip_closing(self, closing: str) -> Part[None]:
        """Consume white space and the closing marker, if they follow; else nothing."""
        start = self.position
        yield from self.skip_spaces()
        if not closing or not (yield from self.starts_with(closing)):
            self.position = start


def overlap(text: str, *markers: str) -> int:
    """Return the number of characters at the end of `text` that may begin one of the markers."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(len(marker) > length and marker.startswith(end) for marker in markers):
            return length
    return 0
