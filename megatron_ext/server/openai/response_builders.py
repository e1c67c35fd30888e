"""Response builders of the two routes: OpenAI's objects, whole and in parts."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.server.openai.answers import PLAIN, AnswerFormat, AnswerPart, AnswerReader, CallPart, thinking_length
from megatron_ext.server.openai.responses import Piece, Scored, generated_scores, prompt_scores
from megatron_ext.text.detokenizer import INCOMPLETE
from megatron_ext.text.vocabulary import Vocabulary

LEAST_LOG_PROB = -9999.0  # JSON has no infinity
CALLED = "tool_calls"  # finish reason of an answer with tool calls


class _Envelope:
    def __init__(self, model: str, vocabulary: Vocabulary, choices: int, prefix: str, *, shows_ids: bool) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.choices = choices
        self.shows_cache = True
        self.explains: Callable[..., str] | None = None
        self.thinking_token: int | None = None
        self.shows_versions = False
        self._vocabulary = vocabulary
        self._shows_ids = shows_ids
        self._fields = {"id": self.id, "created": int(time.time()), "model": model}

    def thinking_length(self, record: RequestRecord) -> int:
        """Return the number of an answer's tokens that are thinking."""
        return 0

    def _ids(self, tokens: Sequence[int]) -> dict[str, object]:
        return {"token_ids": list(tokens)} if self._shows_ids else {}

    def _prompt_ids(self, source: Progress | RequestRecord) -> dict[str, object]:
        return {"prompt_token_ids": list(source.prompt_tokens)} if self._shows_ids else {}


class CompletionResponseBuilder(_Envelope):
    """Response builder of `/v1/completions`.

    Args:
        model: Name that the model is served under.
        vocabulary: Vocabulary that decodes single tokens.
        choices: Choices of each prompt.
        has_scores: Whether log-probs were requested.
        echoes: Prompt text of each choice, if it precedes the output.
        shows_ids: Whether token ids are returned as well.
    """

    def __init__(
        self,
        model: str,
        vocabulary: Vocabulary,
        choices: int,
        *,
        has_scores: bool,
        echoes: Sequence[str] | None,
        shows_ids: bool = False,
    ) -> None:
        super().__init__(model, vocabulary, choices, "cmpl", shows_ids=shows_ids)
        self._has_scores = has_scores
        self._echoes = echoes
        self._offsets: Counter[int] = Counter()  # characters of the tokens shown so far, by choice

    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """Return the fields around the choices."""
        return {"object": "text_completion", **self._fields}

    def heading(self, source: Progress | RequestRecord) -> dict[str, object]:
        """Return no fields: prompts are returned with their choices."""
        return {}

    def opening(self, index: int, first: Progress | RequestRecord) -> dict[str, object] | None:
        """Return the prompt, if echoed, and its ids, if requested."""
        if self._echoes is None and not self._shows_ids:
            return None
        echo = "" if self._echoes is None else self._echoes[index]
        return self._choice(index, Piece(echo, scores=self._prompt_scores(first))) | self._prompt_ids(first)

    def part(self, index: int, piece: Piece) -> dict[str, object] | None:
        """Return a part of a choice."""
        return self._choice(index, piece)

    def choice(self, index: int, record: RequestRecord, first: RequestRecord) -> dict[str, object]:
        """Return a choice of a response without stream; `first` is the record of the prompt's first choice."""
        echo = "" if self._echoes is None else self._echoes[index]
        scores = self._prompt_scores(first) + generated_scores(record, 0)
        piece = Piece(echo + record.generated_text, record.generated_tokens, scores, record.finish_reason)
        return self._choice(index, piece) | self._prompt_ids(record)

    def _choice(self, index: int, piece: Piece) -> dict[str, object]:
        log_probs = self._log_probs(index, piece.scores) if self._has_scores else None
        fields = {"index": index, "text": piece.text, "logprobs": log_probs, "finish_reason": piece.reason}
        return fields | self._ids(piece.tokens)

    def _prompt_scores(self, first: Progress | RequestRecord) -> list[Scored]:
        return prompt_scores(first) if self._has_scores and self._echoes is not None else []

    def _log_probs(self, index: int, scores: Sequence[Scored]) -> dict[str, object]:
        texts = [shown(self._vocabulary, one.token) for one in scores]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [finite(one.log_prob) for one in scores],
            "top_logprobs": [self._best(one) for one in scores],
            "text_offset": offsets,
        }

    def _best(self, one: Scored) -> dict[str, float | None] | None:
        """Return the best tokens and, always, the chosen one. Tokens with equal text count as the best of them."""
        if one.log_prob is None:
            return None
        log_probs: dict[int, float] = one.best | {one.token: one.log_prob}
        ranked = sorted(log_probs.items(), key=lambda item: item[1])
        return {shown(self._vocabulary, token): finite(log_prob) for token, log_prob in ranked}


class ChatResponseBuilder(_Envelope):
    """Response builder of `/v1/chat/completions`.

    Args:
        model: Name that the model is served under.
        vocabulary: Vocabulary that decodes single tokens.
        choices: Choices of the conversation.
        has_scores: Whether log-probs were requested.
        shows_ids: Whether token ids are returned as well.
        form: Format of the answers: what is thinking, and what is a tool call.
    """

    def __init__(
        self,
        model: str,
        vocabulary: Vocabulary,
        choices: int,
        *,
        has_scores: bool,
        shows_ids: bool = False,
        form: AnswerFormat = PLAIN,
    ) -> None:
        super().__init__(model, vocabulary, choices, "chatcmpl", shows_ids=shows_ids)
        self._has_scores = has_scores
        self._form = form
        self._readers = [AnswerReader(form) for _ in range(choices)]

    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """Return the fields around the choices."""
        return {"object": "chat.completion.chunk" if is_part else "chat.completion", **self._fields}

    def heading(self, source: Progress | RequestRecord) -> dict[str, object]:
        """Return the conversation's ids, if requested."""
        return self._prompt_ids(source)

    def opening(self, index: int, first: Progress | RequestRecord) -> dict[str, object] | None:
        """Return the first part of a choice, with the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece) -> dict[str, object] | None:
        """Return a part of a choice; pieces of calls are returned as soon as they are certain."""
        part, reason = self._read(index, piece)
        delta: dict[str, object] = _thinking(part.thinking) if part.thinking else {}
        if part.content:
            delta["content"] = part.content
        if part.calls:
            delta["tool_calls"] = [_call_part(call) for call in part.calls]
        if not delta and reason is None and not piece.scores and not self._shows_ids and not self.shows_versions:
            return None
        log_probs = self._log_probs(piece.scores)
        return {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": reason} | self._ids(
            piece.tokens
        )

    def choice(self, index: int, record: RequestRecord, first: RequestRecord) -> dict[str, object]:
        """Return a choice of a response without stream; `first` is the record of the prompt's first choice."""
        scores = generated_scores(record, 0)
        piece = Piece(record.generated_text, record.generated_tokens, scores, record.finish_reason or "")
        part, reason = self._read(index, piece)
        text = part.content or (None if part.calls else "")
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if self._readers[index].has_thought:
            message |= _thinking(part.thinking)
        if part.calls:
            message["tool_calls"] = [_whole_call(call) for call in part.calls]
        log_probs = self._log_probs(scores)
        return {"index": index, "message": message, "logprobs": log_probs, "finish_reason": reason or None} | self._ids(
            piece.tokens
        )

    def thinking_length(self, record: RequestRecord) -> int:
        """Return the number of an answer's tokens that are thinking, markers included."""
        decode = self._vocabulary.decoder(skips_special=False)
        return thinking_length(record.generated_tokens, self._form, decode)

    def _read(self, index: int, piece: Piece) -> tuple[AnswerPart, str | None]:
        """Return the parts of a piece of text, and the finish reason: None until the choice has ended."""
        reader = self._readers[index]
        part = reader.feed(piece.text, is_last=piece.reason is not None)
        has_called = reader.call_count and piece.reason == "stop"
        return part, CALLED if has_called else piece.reason

    def _log_probs(self, scores: Sequence[Scored]) -> dict[str, object] | None:
        if not self._has_scores:
            return None
        return {"content": scored_tokens(self._vocabulary, scores), "refusal": None}


def _thinking(text: str) -> dict[str, object]:
    """Return the fields of thinking under the names of vLLM and DeepSeek."""
    return {"reasoning": text, "reasoning_content": text}


def _whole_call(call: CallPart) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _call_part(call: CallPart) -> dict[str, object]:
    """Return a part of a call: the first one has its id and name."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}


def scored_tokens(vocabulary: Vocabulary, scores: Sequence[Scored]) -> list[dict[str, object]]:
    """Return tokens with their log-probs and the best alternatives, as a chat answer shows them."""
    content = []
    for one in scores:
        best = [_token(vocabulary, token, log_prob) for token, log_prob in one.best.items()]
        content.append(_token(vocabulary, one.token, one.log_prob) | {"top_logprobs": best})
    return content


def _token(vocabulary: Vocabulary, token: int, log_prob: float | None) -> dict[str, object]:
    text = shown(vocabulary, token)
    is_whole = INCOMPLETE not in text
    return {"token": text, "logprob": finite(log_prob), "bytes": list(text.encode()) if is_whole else None}


def shown(vocabulary: Vocabulary, token: int) -> str:
    """Return the text of a single token."""
    return vocabulary.detokenize([token], skip_special_tokens=False)


def finite(log_prob: float | None) -> float | None:
    """Return a log-prob that JSON can represent."""
    return None if log_prob is None else max(log_prob, LEAST_LOG_PROB)
