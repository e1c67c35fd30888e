"""Log-probs of an answer's tokens, by the text that the client gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.server.openai.answers import AnswerFormat, AnswerReader, CallPart, Thinking
from megatron_ext.server.openai.responses import Piece, Scored
from megatron_ext.text.tool_calls.source import Content
from megatron_ext.text.vocabulary import Vocabulary, bytes_in_text

LEAST_LOG_PROB = -9999.0  # JSON has no infinity


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

    parts: list[tuple[Thinking | Content | CallPart, list[ScoredPart]]]
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


class ScoredReader(AnswerReader):
    """Parser of one answer that finds the tokens of its contents.

    Args:
        answer_format: Format of the answer.
        vocabulary: Vocabulary that decodes single tokens.
    """

    def __init__(self, answer_format: AnswerFormat, vocabulary: Vocabulary) -> None:
        super().__init__(answer_format)
        self._vocabulary = vocabulary
        self._waiting: list[ScoredPart] = []  # of text that is neither content nor anything else so far

    def read(self, piece: Piece) -> AnswerPiece:
        """Return the parts that a new piece makes certain; with scores, each content has the tokens of its text."""
        scores = scored_parts(self._vocabulary, piece.scores, piece.text)
        found: list[tuple[Thinking | Content | CallPart, list[ScoredPart]]] = []
        texts = list(_by_characters(scores)) if scores else [(piece.text, [])]
        for index, (text, tokens) in enumerate(texts, start=1):
            was_thinking = self.is_thinking
            parts = self.parts(text, piece.reason if index == len(texts) else None)
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
