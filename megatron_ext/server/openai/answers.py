"""Answers taken apart: thinking, content and tool calls, as they come, and the log-probs of their tokens."""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.record import LEAST_LOG_PROB, RequestRecord
from megatron_ext.text.chat_template import INVALID_JSON
from megatron_ext.text.reasoning import ReasoningReader
from megatron_ext.text.tool_calls.formats import AnswerFormat
from megatron_ext.text.tool_calls.reader import ToolCallReader
from megatron_ext.text.tool_calls.source import Arguments, CallBegun, Content
from megatron_ext.text.vocabulary import Vocabulary, bytes_in_text

STOP = "stop"  # finish reason of an answer that the model has ended


PLAIN = AnswerFormat()


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


AnswerPart: TypeAlias = Thinking | Content | CallPart


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
    ends = range(len(tokens))
    return bisect_left(ends, True, lo=1, key=lambda end: reasoning.closing in decode(list(tokens[:end])))


def arguments_of(text: str) -> dict[str, object]:
    """Return the arguments of a call as an object; a text that is no JSON object is one with the key `INVALID_JSON`."""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {INVALID_JSON: text}


@dataclass(frozen=True)
class Scored:
    """Token with its log-prob (None for the first of a prompt) and the best alternatives."""

    token: int
    log_prob: float | None
    best: dict[int, float]


def generated_scores(source: Progress | RequestRecord, start: int) -> list[Scored]:
    """Return the scores of the tokens generated from `start` on; empty unless log-probs were requested."""
    log_probs = (source.generated_log_probs or ())[start:]
    best: Sequence[dict[int, float]] = (source.generated_top_n_log_probs or ())[start:] or [{}] * len(log_probs)
    tokens = source.generated_tokens[start : start + len(log_probs)]
    return [Scored(*one) for one in zip(tokens, log_probs, best, strict=True)]


def prompt_scores(source: Progress | RequestRecord) -> list[Scored]:
    """Return the scores of the prompt's tokens, whose log-probs were requested."""
    tokens, log_probs = source.prompt_tokens, source.prompt_log_probs
    assert log_probs is not None, "log-probs of the prompt were asked for"
    best: Sequence[dict[int, float]] = source.prompt_top_n_log_probs or [{}] * len(log_probs)
    return [Scored(tokens[0], None, {}), *(Scored(*one) for one in zip(tokens[1:], log_probs, best, strict=True))]


@dataclass(frozen=True)
class Piece:
    """Next part of a choice.

    Attributes:
        text: Text that cannot change any more; it may be empty.
        tokens: Tokens since the previous piece.
        scores: Scores of these tokens, if requested.
        reason: Finish reason, in the last piece.
    """

    text: str
    tokens: Sequence[int] = ()
    scores: Sequence[Scored] = ()
    reason: str | None = None


@dataclass(frozen=True)
class ScoredPart:
    """Scored token with the bytes of a text that it stands for."""

    score: Scored
    data: bytes

    def to_dict(self, vocabulary: Vocabulary) -> dict[str, object]:
        """Return the token as answers of chats show it, with the best alternatives."""
        best = [_token(vocabulary, token, log_prob) for token, log_prob in self.score.best.items()]
        shown = _token(vocabulary, self.score.token, self.score.log_prob)
        return shown | {"bytes": list(self.data), "top_logprobs": best}


def scored_parts(vocabulary: Vocabulary, scores: Sequence[Scored], text: str) -> list[ScoredPart]:
    """Return scored tokens with their bytes in the text that they came with."""
    found = bytes_in_text(vocabulary, [one.token for one in scores], text)
    return [ScoredPart(*one) for one in zip(scores, found, strict=True)]


@dataclass(frozen=True)
class AnswerPiece:
    """Piece of an answer, divided into the parts that it makes certain, in order.

    Attributes:
        parts: Thinking, contents and calls, each content with its scored tokens.
        scores: Scored tokens of the whole piece.
    """

    parts: list[tuple[AnswerPart, list[ScoredPart]]]
    scores: list[ScoredPart]

    @property
    def thinking(self) -> str:
        """Text of its thinking."""
        return "".join(part.text for part, _ in self.parts if isinstance(part, Thinking))

    @property
    def content(self) -> str:
        """Text of its contents."""
        return "".join(part.text for part, _ in self.parts if isinstance(part, Content))

    @property
    def content_scores(self) -> list[ScoredPart]:
        """Scored tokens of its contents."""
        return [score for _, scores in self.parts for score in scores]

    @property
    def calls(self) -> list[CallPart]:
        """Parts of calls, one for each call."""
        calls: list[CallPart] = []
        for part, _ in self.parts:
            if not isinstance(part, CallPart):
                continue
            if part.name is None and calls:
                calls[-1].arguments += part.arguments
            else:
                calls.append(dataclasses.replace(part))
        return calls


class AnswerReader:
    """Incremental parser of one answer, which finds the tokens of its contents.

    Args:
        answer_format: Format of the answer.
        vocabulary: Vocabulary that decodes single tokens; None for an answer without scores.

    Attributes:
        call_count: Calls so far.
    """

    def __init__(self, answer_format: AnswerFormat, vocabulary: Vocabulary | None = None) -> None:
        self.call_count = 0
        self._vocabulary = vocabulary
        self._waiting: list[ScoredPart] = []  # of text that is neither content nor anything else so far
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

    def read(self, piece: Piece) -> AnswerPiece:
        """Return the parts that a new piece makes certain; with scores, each content has the tokens of its text."""
        scores = [] if self._vocabulary is None else scored_parts(self._vocabulary, piece.scores, piece.text)
        found: list[tuple[AnswerPart, list[ScoredPart]]] = []
        texts = list(_by_characters(scores)) if scores else [(piece.text, [])]
        for index, (text, tokens) in enumerate(texts, start=1):
            was_thinking = self.is_thinking
            parts = self._parts(text, piece.reason if index == len(texts) else None)
            self._waiting += tokens
            for part in parts:
                found.append((part, self._taken(part.text) if isinstance(part, Content) else []))
            has_content = any(isinstance(part, Content) for part in parts)
            if not has_content and (parts or was_thinking or self.is_thinking):
                self._waiting = []  # they are of thinking, or of a call
        return AnswerPiece(found, scores)

    def _taken(self, content: str) -> list[ScoredPart]:
        """Return the tokens of a content, cut to it, and drop them with everything before."""
        wanted, there = content.encode(), b"".join(one.data for one in self._waiting)
        # The waiting text may begin with a rest of thinking or end with the beginning of a call; either is no content.
        if there.startswith(wanted):
            start = 0
        elif there.endswith(wanted):
            start = len(there) - len(wanted)
        else:
            start = there.find(wanted)
        if start < 0:
            return []
        end, at = start + len(wanted), 0
        taken, rest = [], []
        for one in self._waiting:
            inside = one.data[max(0, start - at) : max(0, end - at)]
            after = one.data[max(0, end - at) :]
            at += len(one.data)
            taken += [ScoredPart(one.score, inside)] if inside else []
            rest += [ScoredPart(one.score, after)] if at > end else []
        self._waiting = rest
        return taken

    def _parts(self, text: str, reason: str | None) -> list[AnswerPart]:
        """Return the parts that a new piece of text makes certain, in the order in which the model wrote them."""
        is_last, is_cut = reason is not None, reason not in (None, STOP)
        found: list[AnswerPart] = []
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


def _by_characters(scores: Sequence[ScoredPart]) -> Iterator[tuple[str, list[ScoredPart]]]:
    """Yield the shortest runs of tokens that are whole characters, with their texts."""
    run: list[ScoredPart] = []
    for one in scores:
        if run and one.data and one.data[0] & 0xC0 != 0x80:  # it begins a character
            yield b"".join(part.data for part in run).decode(), run
            run = []
        run.append(one)
    yield b"".join(part.data for part in run).decode(), run


def _token(vocabulary: Vocabulary, token: int, log_prob: float | None) -> dict[str, object]:
    data = list(vocabulary.token_bytes(token))
    return {"token": vocabulary.token_text(token), "logprob": finite(log_prob), "bytes": data}


def finite(log_prob: float | None) -> float | None:
    """Return a log-prob that JSON can represent."""
    return None if log_prob is None else max(log_prob, LEAST_LOG_PROB)
