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
    Part,
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
        self._spaces = ""  # after the content so far
        self._follows_call = False
        self._has_content = False
        self._has_begun = False  # a call since the latest marker
        self._is_kept = True  # the latest call
        self._is_cut = False  # the whole text
        self._source = Source()
        self._parser = self._answer(self._source)

    def feed(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> list[Event]:
        """Return the events that have become certain.

        Args:
            text: New text since the last call.
            is_last: Whether the text ends here. A call that is not closed then counts as far as it goes.
            is_cut: Whether a limit ended the text, and not the model: a beginning of a marker at its end is no content.
        """
        self._is_cut = is_cut
        self._source.add(text, is_last=is_last)
        events: list[Event] = []
        for event in self._parser:
            if event is None:
                break
            if isinstance(event, CallBegun):
                self._has_begun = True
                self._is_kept = self.count < self._max
                self.count += self._is_kept
            if self._is_kept or isinstance(event, Content):
                events.append(event)
        if is_last and not self.count and self._spaces:
            events.append(Content(self._spaces))
        return events

    def _answer(self, source: Source) -> Parser:
        """Parse content and calls in turn; drop what the end of the text leaves incomplete, and spaces before it."""
        while (opened := (yield from self._opened(source))) is not None:
            start = source.position
            try:
                yield from self._calls(source)
            except NotACall:  # the marker is content, and so is what follows up to the next one
                if not source.has_ended or (source.names is not None and not self._is_cut):
                    source.position, self._has_content = start, True
                    yield from self._kept(opened)
                    continue
            self._spaces, self._follows_call = "", True
            if source.has_ended:
                return

    def _opened(self, source: Source) -> Part[str | None]:
        """Parse the content before the next calls; return the marker, or the spaces, before them; None at the end."""
        call_format = self._call_format
        while True:
            held = source.text = source.rest
            source.position = 0
            if call_format.bare and not self._has_content and not self.count:
                start = held.lstrip()
                if not start and (yield from source.more()):
                    continue
                if start.startswith(call_format.bare):
                    source.position, source.names = len(held) - len(start), self._functions
                    return held[: source.position]
            certain = opening = held.find(call_format.opening)
            if opening < 0:
                is_whole = source.is_last and not self._is_cut
                certain = len(held) - (0 if is_whole else overlap(held, call_format.opening))
            yield from self._kept(held[:certain])
            source.position = certain
            if opening >= 0:
                source.position, source.names = certain + len(call_format.opening), None
                return call_format.opening
            if not (yield from source.more()):
                if source.rest:
                    self._spaces = ""
                return None

    def _calls(self, source: Source) -> Parser:
        """Parse calls and their closing marker.

        Arguments that break off end at the marker, or with the text. Other text after a whole call is content, or
        dropped up to the marker.
        """
        call_format, self._has_begun = self._call_format, False
        source.settled, source.has_ended = source.position, False
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
