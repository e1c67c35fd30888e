"""Incremental parser of generated text: content, and tool calls in the format of a family.

Content and calls do not depend on how the text is split into pieces. Text that is not a call stays content, markers
included; spaces between content and calls are dropped. Without a marker, only the name of a given function makes a
call. A call is announced when its name and the beginning of its arguments are certain; from then on its arguments are
what the model writes. A call or marker that the end of the text leaves incomplete is dropped, as far as it was held
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_ext.text.tool_calls.formats import ToolCallFormat
from megatron_ext.text.tool_calls.functions import Function
from megatron_ext.text.tool_calls.source import (
    Arguments,
    BrokenArguments,
    CallBegun,
    Content,
    Event,
    NotACall,
    Parser,
    Source,
    overlap,
)


class ToolCallReader:
    """Incremental parser of a growing text.

    Args:
        call_format: Format of the calls.
        functions: Functions that the model may call. Their schemas say which arguments are texts.
        max_calls: Maximum number of calls returned; later ones are dropped.

    Attributes:
        count: Calls returned so far.
    """

    def __init__(self, call_format: ToolCallFormat, functions: Iterable[Function] = (), max_calls: int = 1024) -> None:
        self.count = 0
        self._call_format = call_format
        self._functions = {function.name: function for function in functions}
        self._max = max_calls
        self._held = ""  # may be the beginning of a call
        self._spaces = ""  # after the content so far
        self._follows_call = False
        self._has_content = False
        self._source: Source | None = None  # of the calls that are being parsed
        self._parser: Iterator[Event | None] = iter(())
        self._opened = ""  # the spaces or the marker before it
        self._is_cut = False  # the whole text
        self._has_begun = False  # one of its calls
        self._is_kept = True  # the latest call

    def feed(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> list[Event]:
        """Return the events that have become certain.

        Args:
            text: New text since the last call.
            is_last: Whether the text ends here. A call that is not closed then counts as far as it goes.
            is_cut: Whether a limit ended the text, and not the model: a beginning of a marker at its end is no content.
        """
        self._is_cut = is_cut
        events = list(self._events(text, is_last=is_last))
        if is_last and not self.count and self._spaces:
            events.append(Content(self._spaces))
        return events

    def _events(self, text: str, *, is_last: bool) -> Iterator[Event]:
        self._held += text
        while True:
            if self._source is None:
                yield from self._content(is_last=is_last)
            source = self._source
            if source is None:
                return
            source.add(self._held, is_last=is_last)
            self._held = ""
            yield from self._calls(source)
            if self._source is not None:  # more text is needed
                return

    def _content(self, *, is_last: bool) -> Iterator[Event]:
        """Yield the content before the next opening marker, and begin to parse after it."""
        call_format = self._call_format
        if call_format.bare and not self._has_content and not self.count:
            start = self._held.lstrip()
            if not start and not is_last:
                return
            if start.startswith(call_format.bare):
                self._begin(self._held[: len(self._held) - len(start)], Source(self._functions))
                return
        opening = self._held.find(call_format.opening)
        certain = opening
        if opening < 0:
            certain = len(self._held) - (
                0 if is_last and not self._is_cut else overlap(self._held, call_format.opening)
            )
        yield from self._kept(self._held[:certain])
        self._held = self._held[certain:]
        if opening >= 0:
            self._begin(call_format.opening, Source())
        elif is_last and self._held:
            self._drop()

    def _begin(self, opened: str, source: Source) -> None:
        self._opened, self._held = opened, self._held.removeprefix(opened)
        self._source, self._has_begun = source, False
        self._parser = self._parsed(source)

    def _drop(self) -> None:
        """Drop what the end of the text leaves incomplete, and the spaces before it."""
        self._source, self._held, self._spaces = None, "", ""

    def _parsed(self, source: Source) -> Parser:
        """Parse calls and their closing marker.

        Arguments that break off end at the marker, or with the text. Other text after a whole call is content, or
        dropped up to the marker.
        """
        call_format = self._call_format
        try:
            yield from call_format.syntax.parse(source, self._functions)
            yield from source.skip_closing(call_format.closing)
        except NotACall as error:
            if not self._has_begun:
                raise
            is_broken = isinstance(error, BrokenArguments)
            if source.has_ended:
                return
            if is_broken or (call_format.closing and source.names is None):
                yield from _broken(source, call_format.closing, is_kept=is_broken)
            else:
                source.position = source.settled

    def _calls(self, source: Source) -> Iterator[Event]:
        """Yield the events of the calls as far as the text goes."""
        try:
            for event in self._parser:
                if event is None:
                    return
                if isinstance(event, CallBegun):
                    self._has_begun = True
                    self._is_kept = self.count < self._max
                    self.count += self._is_kept
                if self._is_kept:
                    yield event
        except NotACall:  # the marker is content, and so is what follows up to the next one
            if source.has_ended and (source.names is None or self._is_cut):
                self._drop()
                return
            self._source, self._held = None, source.text
            self._has_content = True
            yield from self._kept(self._opened)
            return
        self._drop()
        self._held, self._follows_call = "" if source.has_ended else source.rest, True

    def _kept(self, text: str) -> Iterator[Event]:
        """Yield the text as content, less the spaces at its end, which may precede a call."""
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        text = self._spaces + text
        content = text.rstrip()
        self._spaces = text[len(content) :]
        if content:
            self._has_content = True
            yield Content(content)


def _broken(source: Source, closing: str, *, is_kept: bool) -> Parser:
    """Consume the rest of a call up to its closing marker; keep it if it is what the model wrote as arguments."""
    while True:
        rest = source.rest
        end = rest.find(closing) if closing else -1
        certain = end if end >= 0 else len(rest) - overlap(rest, closing)
        if certain and is_kept:
            yield Arguments(rest[:certain])
        source.position += certain
        if end >= 0:
            source.position += len(closing)
            return
        if not (yield from source.more()):
            return
