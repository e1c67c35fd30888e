"""Records of the engine as OpenAI's objects, whole and in parts."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.server.errors import FAULT, ApiError
from megatron_ext.server.progress import RequestHandle
from megatron_ext.stepping.progress import Progress
from megatron_ext.text.detokenizer import INCOMPLETE
from megatron_ext.text.vocabulary import Vocabulary

LEAST_LOG_PROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Scored:
    """A token with its log-prob (None for the first of a prompt) and the best alternatives."""

    token: int
    log_prob: float | None
    best: dict[int, float]


def generated_scores(source: Progress | RequestRecord, start: int) -> list[Scored]:
    """Of the tokens generated from `start` on; none if nobody asked."""
    log_probs = (source.generated_log_probs or ())[start:]
    best: Sequence[dict[int, float]] = (source.generated_top_n_log_probs or ())[start:] or [{}] * len(log_probs)
    tokens = source.generated_tokens[start : start + len(log_probs)]
    return [Scored(*one) for one in zip(tokens, log_probs, best, strict=True)]


def prompt_scores(source: Progress | RequestRecord) -> list[Scored]:
    """Of the prompt's tokens, for which log-probs were asked."""
    tokens, log_probs = source.prompt_tokens, source.prompt_log_probs
    assert log_probs is not None, "log-probs of the prompt were asked for"
    best: Sequence[dict[int, float]] = source.prompt_top_n_log_probs or [{}] * len(log_probs)
    return [Scored(tokens[0], None, {}), *(Scored(*one) for one in zip(tokens[1:], log_probs, best, strict=True))]


def finished(handle: RequestHandle) -> RequestRecord:
    """The record of a handle that has ended well.

    Raises:
        ApiError: It has not.
    """
    if handle.error is not None:
        raise handle.error
    record = handle.record
    assert record is not None, "the request has not ended"
    if record.status is Status.FAILED:
        error = record.error or "the request failed"
        raise ApiError(500, error, kind=FAULT) if record.is_fault else ApiError(400, error)
    if record.status is Status.ABORTED:
        raise ApiError(500, "the request was aborted", kind=FAULT)
    return record


def usage(reply: Reply, records: Sequence[RequestRecord]) -> dict[str, object]:
    """OpenAI's usage, and why prompt tokens were computed.

    The choices of a prompt count its tokens once: as they were skipped and computed for the first of them.

    Args:
        reply: Says how many choices a prompt has, and whether to tell what was cached.
        records: Prompt by prompt, the choices of each side by side.
    """
    firsts = records[:: reply.choices]
    prompt = sum(record.prompt_token_count for record in firsts)
    generated = sum(len(record.generated_tokens) for record in records)
    reasons: Counter[str] = sum((Counter(record.prefill_reasons) for record in firsts), Counter())
    counts: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    if reply.shows_cache:
        counts["prompt_tokens_details"] = {
            "cached_tokens": sum(record.skipped_prefill_token_count for record in firsts),
            "computed_tokens_by_reason": dict(reasons),
        }
    return counts


class Reply(Protocol):
    """What differs between the two routes."""

    id: str
    choices: int  # of each prompt
    shows_cache: bool  # whether the usage says what was cached

    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """The fields around the choices."""

    def opening(self, index: int, source: Progress | RequestRecord) -> dict[str, object] | None:
        """The first part of a choice, before any text."""

    def part(self, index: int, text: str, scores: Sequence[Scored], reason: str | None) -> dict[str, object]:
        """A part of a choice."""

    def choice(self, index: int, record: RequestRecord) -> dict[str, object]:
        """A whole choice."""


def whole(reply: Reply, records: Sequence[RequestRecord]) -> dict[str, object]:
    """The answer in one piece."""
    choices = [reply.choice(index, record) for index, record in enumerate(records)]
    return reply.envelope(is_part=False) | {"choices": choices, "usage": usage(reply, records)}


class _Envelope:
    def __init__(self, model: str, choices: int, prefix: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.choices = choices
        self.shows_cache = True
        self._fields = {"id": self.id, "created": int(time.time()), "model": model}


class CompletionReply(_Envelope):
    """Of `/v1/completions`.

    Args:
        model: The name it is served under.
        vocabulary: To show single tokens.
        choices: Of each prompt.
        has_scores: Whether log-probs were asked for.
        echoes: The text of the prompt of each choice, if it comes before the answer.
    """

    def __init__(
        self, model: str, vocabulary: Vocabulary, choices: int, *, has_scores: bool, echoes: Sequence[str] | None
    ) -> None:
        super().__init__(model, choices, "cmpl")
        self._vocabulary = vocabulary
        self._has_scores = has_scores
        self._echoes = echoes
        self._offsets: Counter[int] = Counter()  # characters of the tokens shown so far, by choice

    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """The fields around the choices."""
        return {"object": "text_completion", **self._fields}

    def opening(self, index: int, source: Progress | RequestRecord) -> dict[str, object] | None:
        """The prompt, if it is echoed."""
        if self._echoes is None:
            return None
        return self.part(index, self._echoes[index], self._prompt_scores(source), None)

    def part(self, index: int, text: str, scores: Sequence[Scored], reason: str | None) -> dict[str, object]:
        """A part of a choice, or all of it."""
        log_probs = self._log_probs(index, scores) if self._has_scores else None
        return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": reason}

    def choice(self, index: int, record: RequestRecord) -> dict[str, object]:
        """A whole choice."""
        text, scores = record.generated_text, generated_scores(record, 0)
        if self._echoes is not None:
            text, scores = self._echoes[index] + text, self._prompt_scores(record) + scores
        return self.part(index, text, scores, record.finish_reason)

    def _prompt_scores(self, source: Progress | RequestRecord) -> list[Scored]:
        return prompt_scores(source) if self._has_scores else []

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
        """The best tokens and, always, the chosen one. Of tokens that read the same the best counts."""
        if one.log_prob is None:
            return None
        log_probs: dict[int, float] = one.best | {one.token: one.log_prob}
        ranked = sorted(log_probs.items(), key=lambda item: item[1])
        return {shown(self._vocabulary, token): finite(log_prob) for token, log_prob in ranked}


class ChatReply(_Envelope):
    """Of `/v1/chat/completions`.

    Args:
        model: The name it is served under.
        vocabulary: To show single tokens.
        choices: Of the conversation.
        has_scores: Whether log-probs were asked for.
    """

    def __init__(self, model: str, vocabulary: Vocabulary, choices: int, *, has_scores: bool) -> None:
        super().__init__(model, choices, "chatcmpl")
        self._vocabulary = vocabulary
        self._has_scores = has_scores

    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """The fields around the choices."""
        return {"object": "chat.completion.chunk" if is_part else "chat.completion", **self._fields}

    def opening(self, index: int, source: Progress | RequestRecord) -> dict[str, object] | None:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, text: str, scores: Sequence[Scored], reason: str | None) -> dict[str, object]:
        """A part of a choice."""
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": self._log_probs(scores), "finish_reason": reason}

    def choice(self, index: int, record: RequestRecord) -> dict[str, object]:
        """A whole choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": record.generated_text, "refusal": None},
            "logprobs": self._log_probs(generated_scores(record, 0)),
            "finish_reason": record.finish_reason,
        }

    def _log_probs(self, scores: Sequence[Scored]) -> dict[str, object] | None:
        if not self._has_scores:
            return None
        content = []
        for one in scores:
            best = [self._token(token, log_prob) for token, log_prob in one.best.items()]
            content.append(self._token(one.token, one.log_prob) | {"top_logprobs": best})
        return {"content": content, "refusal": None}

    def _token(self, token: int, log_prob: float | None) -> dict[str, object]:
        text = shown(self._vocabulary, token)
        is_whole = INCOMPLETE not in text
        return {"token": text, "logprob": finite(log_prob), "bytes": list(text.encode()) if is_whole else None}


def shown(vocabulary: Vocabulary, token: int) -> str:
    """One token by itself."""
    return vocabulary.detokenize([token], skip_special_tokens=False)


def finite(log_prob: float | None) -> float | None:
    """A log-prob that JSON can hold."""
    return None if log_prob is None else max(log_prob, LEAST_LOG_PROB)
