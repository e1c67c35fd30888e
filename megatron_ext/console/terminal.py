"""Text on its way to a terminal, a pipe or a file: harmless, of a known width, and never the end of a run (SE-4)."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import unicodedata
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len, get_character_cell_size

# Controls (a terminal obeys them), formats (they turn the direction of what follows), halves of pairs, line separators.
_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_JOINERS = "\u200c\u200d"  # parts of words and of emoji; they move nothing
ELLIPSIS = "..."


def printable(text: str) -> str:
    r"""`text` on one line, with what a terminal would obey spelled out: an escape character becomes `\x1b`."""
    text = " ".join(text.split())
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spelled(character) for character in text)


def _spelled(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in _UNSAFE:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def beginning(text: str, width: int) -> str:
    """As much of the start of `text` as `width` columns hold; wide characters take two."""
    return text if cell_len(text) <= width else _fitting(text, width - len(ELLIPSIS)) + ELLIPSIS


def end(text: str, width: int) -> str:
    """As much of the end of `text` as `width` columns hold."""
    if cell_len(text) <= width:
        return text
    kept = _fitting(text[-width:][::-1], width - len(ELLIPSIS))[::-1]
    return ELLIPSIS + kept


def _fitting(text: str, width: int) -> str:
    used = 0
    for index, character in enumerate(text):
        used += get_character_cell_size(character)
        if used > width:
            return text[:index]
    return text


def wrapped(text: str, width: int, lines: int) -> list[str]:
    """The start of `text` on at most so many lines of so many columns; cut between words where there are any."""
    found: list[str] = []
    while text and len(found) < lines - 1:
        line = _fitting(text, width)
        if len(line) < len(text) and " " in line.rstrip() and text[len(line)] != " ":
            line = line[: line.rindex(" ") + 1]
        found.append(line.rstrip())
        text = text[max(1, len(line)) :].lstrip()
    return [*found, beginning(text, width)] if text or not found else found


class Output(io.TextIOBase):
    """Standard output that never raises: what its encoding cannot say is spelled out, what it cannot take is dropped.

    Args:
        stream: Where to; None for a process that was started without.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.error: OSError | None = None  # why nothing more is written

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has an attribute that can be set
        """Of the stream; rich draws in ASCII where it is not UTF-8."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether a person looks."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """The stream's descriptor."""
        if self._stream is None:
            raise io.UnsupportedOperation("there is no standard output")
        return self._stream.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Write, or drop what cannot be written."""
        if self._stream is not None and self.error is None:
            safe = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            self._guard(functools.partial(self._stream.write, safe))
        return len(text)

    def flush(self) -> None:
        """Hand on what is buffered, or drop it."""
        if self._stream is not None and self.error is None:
            self._guard(self._stream.flush)

    @property
    def failure(self) -> str | None:
        """What a user must be told; that a reader left is no failure."""
        if self.error is None or isinstance(self.error, BrokenPipeError):
            return None
        return f"standard output could not be written: {self.error.strerror or self.error}"

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            self.error = error
            self._discard_rest()

    def _discard_rest(self) -> None:
        """What the stream still buffers must not fail again when the process ends."""
        with contextlib.suppress(io.UnsupportedOperation):
            number = self.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
