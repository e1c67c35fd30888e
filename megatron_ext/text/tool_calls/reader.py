"""Incremental parser of generated text: content, and tool calls in the format of a family.

Content and calls do not depend on how the text is split into pieces. Text that is not a call stays content, markers
included; spaces between content and calls are dropped. A call is announced when its name and the beginning of its
arguments are certain; from then on its arguments are what the model writes, valid or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_ext.text.tool_calls.events import Arguments, CallBegun, Content, Event
from megatron_ext.text.tool_calls.formats import ToolCallFormat
from megatron_ext.text.tool_calls.functions import Function
from megatron_ext.text.tool_calls.source import NotACall, Parser, Source, overlap


class ToolCallReader:
    """Incremental parser of a growing text.

    Args:
        form: Format of the calls.
        functions: Functions that the model may call, whose schemas say which arguments are texts.
        max_calls: Maximum number of calls returned; later ones are dropped.

    Attributes:
        count: Calls returned so far.
    """

    def __init__(self, form: ToolCallFormat, functions: Iterable[Function] = (), max_calls: int = 1024) -> None:
        self.count = 0
        self._form = form
        self._functions = {function.name: function for function in functions}
        self._max = max_calls
        self._held = ""  # may be the beginning of a call
        self._spaces = ""  # after the content so far
        self._follows_call = False
        self._has_content = False
        self._source: Source | None = None  # of the calls that are being parsed
        self._parser: Iterator[Event | None] = iter(())
        self._opened = ""  # spaces and marker before it
        self._has_begun = False  # one of its calls
        self._is_kept = True  # the latest call

    def feed(self, text: str, *, is_last: bool = False) -> list[Event]:
        """Return the events that have become certain.

        Args:
            text: New text since the last call.
            is_last: Whether the text ends here. A call that is not closed then counts as far as it goes.
        """
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
        form = self._form
        if form.bare and not self._has_content and not self.count:
            start = self._held.lstrip()
            if not start and not is_last:
                return
            if start.startswith(form.bare):
                self._begin(self._held[: len(self._held) - len(start)])
                return
        opening = self._held.find(form.opening)
        certain = opening
        if opening < 0:
            certain = len(self._held) - (0 if is_last else overlap(self._held, form.opening))
        yield from self._kept(self._held[:certain])
        self._held = self._held[certain:]
        if opening >= 0:
            self._begin(form.opening)

    def _begin(self, opened: str) -> None:
        self._opened, self._held = opened, self._held.removeprefix(opened)
        self._source, self._has_begun = Source(), False
        self._parser = self._parsed(self._source)

    def _parsed(self, source: Source) -> Parser:
        """Parse calls and their closing marker; a call that breaks off ends at the marker."""
        form = self._form
        try:
            yield from form.syntax.parse(source, self._functions)
            yield from source.skip_closing(form.closing)
        except NotACall:
            if not self._has_begun:
                raise
            yield from _broken(source, form)

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
            self._source, self._held = None, source.text
            self._has_content = True
            yield from self._kept(self._opened)
            return
        self._source, self._held = None, source.rest
        self._spaces, self._follows_call = "", True

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


def _broken(source: Source, form: ToolCallFormat) -> Parser:
    """Consume the rest of a call up to its closing marker; in JSON it is what the model wrote as arguments."""
    closing = form.closing
    while True:
        rest = source.rest
        end = rest.find(closing) if closing else -1
        certain = end if end >= 0 else len(rest) - (0 if source.is_last else overlap(rest, closing))
        if certain and form.syntax.is_json:
            yield Arguments(rest[:certain])
        source.position += certain
        if end >= 0 or source.is_last:
            source.position += len(closing) if end >= 0 else 0
            return
        yield None
