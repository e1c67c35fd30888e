"""Answers taken apart: thinking, content and tool calls, as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.text.reasoning import ReasoningFormat, ReasoningReader
from megatron_ext.text.tool_calls.formats import HERMES, ToolCallFormat
from megatron_ext.text.tool_calls.functions import Function
from megatron_ext.text.tool_calls.reader import ToolCallReader
from megatron_ext.text.tool_calls.source import Arguments, CallBegun, Content


@dataclass(frozen=True)
class AnswerFormat:
    """Format of an answer.

    Attributes:
        calls: Format of tool calls.
        functions: Functions that may be called.
        max_calls: Maximum number of calls that are read; 0 for no calls.
        reasoning: Markers of thinking; None if thinking is not separated.
        begins_inside: Whether the answer begins inside of thinking.
    """

    calls: ToolCallFormat = HERMES
    functions: tuple[Function, ...] = ()
    max_calls: int = 0
    reasoning: ReasoningFormat | None = None
    begins_inside: bool = False


PLAIN = AnswerFormat()
STOP = "stop"  # finish reason of an answer that the model has ended


@dataclass
class CallPart:
    """New part of one call.

    Attributes:
        index: Position of the call in the answer.
        name: Name, in the first part of a call; None in later ones.
        arguments: Next piece of the arguments' JSON text.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True)
class Thinking:
    """New piece of thinking."""

    text: str


class AnswerReader:
    """Incremental parser of one answer.

    Args:
        answer_format: Format of the answer.

    Attributes:
        call_count: Calls so far.
    """

    def __init__(self, answer_format: AnswerFormat) -> None:
        self.call_count = 0
        reasoning, calls, limit = answer_format.reasoning, answer_format.calls, answer_format.max_calls
        is_inside = answer_format.begins_inside
        self._thinking = None if reasoning is None else ReasoningReader(reasoning, is_inside=is_inside)
        self._calls = ToolCallReader(calls, answer_format.functions, limit) if limit else None

    @property
    def has_thought(self) -> bool:
        """True if the answer has thinking so far."""
        return self._thinking is not None and self._thinking.has_thought

    @property
    def is_thinking(self) -> bool:
        """True if the answer so far ends inside of thinking."""
        return self._thinking is not None and self._thinking.is_inside

    def parts(self, text: str, reason: str | None) -> list[Thinking | Content | CallPart]:
        """Return the parts that a new piece of text makes certain, in the order in which the model wrote them.

        Args:
            text: New text since the last call.
            reason: Finish reason; None if more text follows.
        """
        is_last, is_cut = reason is not None, reason not in (None, STOP)
        found: list[Thinking | Content | CallPart] = []
        if self._thinking is not None:
            thinking, text = self._thinking.feed(text, is_last=is_last, is_cut=is_cut)
            found += [Thinking(thinking)] if thinking else []
        if self._calls is None:
            return [*found, Content(text)] if text else found
        for event in self._calls.feed(text, is_last=is_last, is_cut=is_cut):
            if isinstance(event, Content):
                found.append(event)
            elif isinstance(event, CallBegun):
                found.append(CallPart(self.call_count, event.name))
                self.call_count += 1
            elif isinstance(event, Arguments):
                if not found or not isinstance(found[-1], CallPart):
                    found.append(CallPart(self.call_count - 1))
                last = found[-1]
                assert isinstance(last, CallPart), "it has just been added"
                last.arguments += event.text
        return found


def thinking_length(tokens: Sequence[int], answer_format: AnswerFormat, decode: Callable[[list[int]], str]) -> int:
    """Return the number of an answer's tokens that are thinking, markers included.

    Args:
        tokens: Tokens of the answer.
        answer_format: Format of the answer.
        decode: Token ids to text, special tokens included.
    """
    reasoning = answer_format.reasoning
    if reasoning is None or not tokens:
        return 0
    if not answer_format.begins_inside and not decode(list(tokens)).lstrip().startswith(reasoning.opening):
        return 0
    low, high = 0, len(tokens)  # the marker is complete after `high` tokens, or never
    while high - low > 1:
        middle = (low + high) // 2
        if reasoning.closing in decode(list(tokens[:middle])):
            high = middle
        else:
            low = middle
    return high
