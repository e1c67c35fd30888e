"""Evaluation of tool calls on prompts whose function names and arguments are in no training conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields

from examples.embedded_model.conversations import Exchange
from megatron_ext import LoadedEngine, RequestParams
from megatron_ext.text.chat_template import ENABLE_THINKING, ChatOptions, render_chat
from megatron_ext.text.reasoning import ReasoningReader
from megatron_ext.text.reasoning import format_of as reasoning_format_of
from megatron_ext.text.tool_calls.formats import format_of
from megatron_ext.text.tool_calls.reader import ToolCallReader
from megatron_ext.text.tool_calls.source import Arguments, CallBegun

LONGEST_ANSWER = 96  # tokens
END_OF_TURN = 4  # id of <|end|>


@dataclass(frozen=True)
class ToolScores:
    """Shares of prompts; each is at most the one before it.

    Attributes:
        calls: The answer is a single call of a function in the prompt.
        functions: It is the right one.
        valid: And its arguments are a JSON object.
        right: And they are the expected ones.
    """

    calls: float
    functions: float
    valid: float
    right: float


@dataclass(frozen=True)
class ParsedCall:
    """Call in an answer: name and the JSON text of its arguments."""

    name: str
    arguments: str


def prompt(template: str, exchange: Exchange, *, thinks: bool) -> str:
    """Return the text that asks for a call."""
    variables = {ENABLE_THINKING: True} if thinks else {}
    options = ChatOptions(tools=tuple(tool.schema for tool in exchange.tools), variables=variables)
    return render_chat(template, exchange.messages, {}, options)


def parsed_calls(template: str, answer: str, *, thinks: bool) -> list[ParsedCall]:
    """Return the calls of an answer, as a server reads them: with the parsers that the template shows."""
    if (form := reasoning_format_of(template)) is not None:
        _, answer = ReasoningReader(form, is_inside=thinks).feed(answer, is_last=True)
    calls: list[ParsedCall] = []
    for event in ToolCallReader(format_of(template)).feed(answer, is_last=True):
        if isinstance(event, CallBegun):
            calls.append(ParsedCall(event.name, ""))
        elif isinstance(event, Arguments):
            calls[-1] = ParsedCall(calls[-1].name, calls[-1].arguments + event.text)
    return calls


def score(calls: Sequence[ParsedCall], exchange: Exchange) -> ToolScores:
    """Return 0 or 1 for each share, for the calls of one answer."""
    name, expected = exchange.expected
    is_call = len(calls) == 1 and calls[0].name in [tool.name for tool in exchange.tools]
    is_function = is_call and calls[0].name == name
    found = _json(calls[0].arguments) if is_function else None
    is_valid = isinstance(found, dict)
    return ToolScores(*map(float, (is_call, is_function, is_valid, is_valid and found == expected)))


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def tool_scores(
    engine: LoadedEngine, template: str, exchanges: Sequence[Exchange], *, thinks: bool = False
) -> ToolScores:
    """Return the mean scores of greedy answers.

    Args:
        engine: The model.
        template: Its chat template.
        exchanges: Prompts and the calls that are right.
        thinks: Whether the prompt asks for thinking.
    """
    params = RequestParams(num_tokens_to_generate=LONGEST_ANSWER, temperature=0.0, stop_token_ids=(END_OF_TURN,))
    records = engine.generate([prompt(template, exchange, thinks=thinks) for exchange in exchanges], params)
    found = [
        score(parsed_calls(template, record.generated_text or "", thinks=thinks), exchange)
        for record, exchange in zip(records, exchanges, strict=True)
    ]
    return ToolScores(*(sum(getattr(one, field.name) for one in found) / len(found) for field in fields(ToolScores)))
