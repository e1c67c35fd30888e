"""Text output to a terminal, a pipe or a file: escaped, of known width, and never fatal to a run (SE-4)."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len, get_character_cell_size

from megatron_ext.errors import ConfigError, RankError
from megatron_ext.parallel.world import message_of_this_rank

_BAD_USAGE = 2  # exit code
# Controls (terminals execute them), formats (they change text direction), surrogates, line separators.
_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
_JOINERS = "\u200c\u200d"  # parts of words and of emoji; harmless
ELLIPSIS = "..."


def printable(text: str) -> str:
    r"""Return `text` on one line, with control characters spelled out: an escape character becomes `\x1b`."""
    text = " ".join(text.split())
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spelled(character) for character in text)


def _spelled(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in _UNSAFE:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def beginning(text: str, width: int) -> str:
    """Return as much of the start of `text` as fits into `width` columns; wide characters take two."""
    return text if cell_len(text) <= width else _fitting(text, width - len(ELLIPSIS)) + ELLIPSIS


def end(text: str, width: int) -> str:
    """Return as much of the end of `text` as fits into `width` columns."""
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
    """Return the start of `text` on at most `lines` lines of `width` columns, broken between words where possible."""
    found: list[str] = []
    while text and len(found) < lines - 1:
        line = _fitting(text, width)
        if len(line) < len(text) and " " in line.rstrip() and text[len(line)] != " ":
            line = line[: line.rindex(" ") + 1]
        found.append(line.rstrip())
        text = text[max(1, len(line)) :].lstrip()
    return [*found, beginning(text, width)] if text or not found else found


class Output(io.TextIOBase):
    """Standard output that never raises: unencodable text is escaped, and text that cannot be written is dropped.

    Args:
        stream: Stream to write to; None for a process without standard output.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.error: OSError | None = None  # first error of writing

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a settable attribute in typeshed
        """Encoding of the stream; rich draws in ASCII unless it is UTF-8."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        if self._stream is None:
            raise io.UnsupportedOperation("standard output is closed")
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Write the text, or drop it if it cannot be written."""
        if self._stream is not None and self.error is None:
            safe = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            self._guard(functools.partial(self._stream.write, safe))
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or drop its buffered text."""
        if self._stream is not None and self.error is None:
            self._guard(self._stream.flush)

    @property
    def failure(self) -> str | None:
        """Error to report to the user; a reader that closed its pipe is no error."""
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
        """Redirect the stream's buffer to the null device, so that it cannot fail again at exit."""
        with contextlib.suppress(io.UnsupportedOperation):
            number = self.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


def print_message(program: str, line: str) -> None:
    """Print one line on standard error, escaped; drop it if standard error is closed."""
    stream = Output(sys.stderr)
    stream.write(f"{program}: {printable(line)}\n")
    stream.flush()


def report_error(program: str, error: ConfigError | RankError) -> int:
    """Print a user's mistake or a rank's failure in one line, unless another rank does; return the exit code."""
    line = message_of_this_rank(error) if isinstance(error, ConfigError) else str(error)
    if line:
        print_message(program, f"error: {line}")
    return _BAD_USAGE if isinstance(error, ConfigError) else error.exit_code
