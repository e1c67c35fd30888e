"""Engine records as OpenAI's objects, whole and in parts, by a builder for each route."""

from __future__ import annotations

import abc
import base64
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ext.engine.pausing import ABORT
from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.token_versions import part_of
from megatron_ext.server.api_errors import FAULT, REQUEST_FAILED, ApiError, aborted
from megatron_ext.server.openai.answers import (
    PLAIN,
    AnswerPart,
    AnswerPiece,
    AnswerReader,
    CallPart,
    Piece,
    Scored,
    ScoredPart,
    finite,
    generated_scores,
    prompt_scores,
    scored_parts,
    thinking_length,
)
from megatron_ext.server.request_manager import RequestHandle
from megatron_ext.text.detokenizer import excerpt
from megatron_ext.text.tool_calls.formats import AnswerFormat
from megatron_ext.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from megatron_ext.server.openai.protocol import ChatRequest, CompletionRequest

DROPPED_THINKING = "dropped_thinking"
_DROPPED_THINKING_TEXT = "The chat template drops the thinking of an earlier turn, which the cached prefix has there"
_DROPPED_THINKING_ADVICE = "Use a chat template that keeps the thinking of earlier turns, or turn thinking off."
Event = dict[str, Any]
CALLED = "tool_calls"  # finish reason of an answer with tool calls


def finished(handle: RequestHandle) -> RequestRecord:
    """Return the record of a handle that has completed, or was ended by a pause with all scores that it owes.

    Raises:
        ApiError: The request has failed, or was aborted.
    """
    if handle.error is not None:
        raise handle.error
    record = handle.result
    assert record is not None, "the request has not ended"
    if record.status is Status.FAILED:
        error = record.error or "the request failed"
        raise ApiError(500, error, kind=FAULT, code=REQUEST_FAILED) if record.is_fault else ApiError(400, error)
    scores = record.prompt_log_probs
    has_scores = scores is None or len(scores) == len(record.prompt_tokens) - 1
    if record.status is Status.ABORTED and not (record.finish_reason == ABORT and has_scores):
        raise aborted()  # by an update of the weights
    return record


def usage(builder: AnswerBuilder, records: Sequence[RequestRecord]) -> dict[str, object]:
    """Return OpenAI's usage, with recomputed prompt tokens, and draft tokens under OpenAI's names for predictions.

    The choices of a prompt count its tokens once, as they were cached and computed for the first choice.

    Args:
        builder: Number of choices of a prompt, and whether cached tokens are shown.
        records: Records prompt by prompt, the choices of each side by side.
    """
    firsts = records[:: builder.choices]
    prompt = sum(record.prompt_token_count for record in firsts)
    generated = sum(len(record.generated_tokens) for record in records)
    reasons: Counter[str] = sum((Counter(record.prefill_reasons) for record in firsts), Counter())
    counts: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    details = {}
    thinking = sum(map(builder.thinking_length, records))
    if thinking:
        details["reasoning_tokens"] = thinking
    drafted = sum(record.draft_token_count for record in records)
    if drafted:
        accepted = sum(record.accepted_token_count for record in records)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    if details:
        counts["completion_tokens_details"] = details
    if builder.shows_cache:
        counts["prompt_tokens_details"] = {
            "cached_tokens": sum(record.skipped_prefill_token_count for record in firsts),
            "computed_tokens_by_reason": dict(reasons),
        }
    return counts


def usage_so_far(builder: ResponseBuilder, handles: Sequence[RequestHandle]) -> dict[str, int]:
    """Return the usage of an unfinished response; cached tokens are reported at its end."""
    sources = [handle.result or handle.progress for handle in handles]
    prompt = sum(len(handle.inputs.prompt_tokens) for handle in handles[:: builder.choices])
    generated = sum(len(source.generated_tokens) for source in sources if source is not None)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


class AnswerBuilder:
    """Base of the builders of answers: identity of an answer, and what of its records it shows.

    Args:
        answer_id: Id of the answer.
        vocabulary: Vocabulary that decodes tokens.
        answer_format: Format of the answer's thinking and tool calls.
        choices: Choices of each prompt.

    Attributes:
        has_scores: Whether the answer has log-probs.
        shows_cache: Whether the usage has the number of cached tokens.
        explains: Decoder of the text in prefix cache explanations; None for no explanations.
        thinking_token: First token of thinking; None if the model does not think.
    """

    def __init__(
        self, answer_id: str, vocabulary: Vocabulary, answer_format: AnswerFormat = PLAIN, choices: int = 1
    ) -> None:
        self.id = answer_id
        self.choices = choices
        self.has_scores = False
        self.shows_cache = True
        self.explains: Callable[..., str] | None = None
        self.thinking_token: int | None = None
        self.vocabulary = vocabulary
        self._answer_format = answer_format

    def thinking_length(self, record: RequestRecord) -> int:
        """Return the number of an answer's tokens that are thinking, markers included."""
        decode = self.vocabulary.decoder(skips_special=False)
        return thinking_length(record.generated_tokens, self._answer_format, decode)


class EventBuilder(AnswerBuilder, abc.ABC):
    """Builder of one answer as typed events, which add up to the whole answer: blocks of thinking, text, or one call.

    Args:
        answer_id: Id of the answer.
        vocabulary: Vocabulary that decodes tokens.
        answer_format: Format of the answer's thinking and tool calls.
    """

    def __init__(self, answer_id: str, vocabulary: Vocabulary, answer_format: AnswerFormat) -> None:
        super().__init__(answer_id, vocabulary, answer_format)
        self._reader = AnswerReader(answer_format, vocabulary)
        self._open: type[AnswerPart] | None = None  # kind of the block that the model is writing
        self._texts: list[str] = []  # of this block

    @abc.abstractmethod
    def begin(self, source: Progress | RequestRecord) -> Iterator[Event]:
        """Yield the events before any output."""

    def feed(self, piece: Piece) -> Iterator[Event]:
        """Yield the events of the next piece; the last one closes all that is open."""
        for part, scores in self._reader.read(piece).parts:
            yield from self._take(part, scores)
        if piece.reason is not None:
            yield from self._end(piece.reason)

    @abc.abstractmethod
    def finish(self, record: RequestRecord) -> list[Event]:
        """Return the last events, after the last piece."""

    @abc.abstractmethod
    def fail(self, error: ApiError) -> Event:
        """Return the last event of an answer that has failed."""

    def _take(self, part: AnswerPart, scores: Sequence[ScoredPart] = ()) -> Iterator[Event]:
        is_new = part.name is not None if isinstance(part, CallPart) else self._open is not type(part)
        if is_new:
            yield from self._close()
            self._open, self._texts = type(part), []
            yield from self._begin_block(part)
        text = part.arguments if isinstance(part, CallPart) else part.text
        self._texts.append(text)
        yield from self._delta(text, scores)

    def _end(self, reason: str) -> Iterator[Event]:
        """Yield the events of the end of the output."""
        yield from self._close(reason)

    def _close(self, reason: str | None = None) -> Iterator[Event]:
        """Yield the events of the end of the open block; `reason` is the finish reason of the last one."""
        if self._open is not None:
            yield from self._end_block("".join(self._texts), reason)
            self._open = None

    @abc.abstractmethod
    def _begin_block(self, part: AnswerPart) -> Iterator[Event]:
        """Yield the events of the beginning of a block, before the text of its first part."""

    @abc.abstractmethod
    def _delta(self, text: str, scores: Sequence[ScoredPart]) -> Iterator[Event]:
        """Yield the events of the next text, or arguments, of the open block."""

    @abc.abstractmethod
    def _end_block(self, text: str, reason: str | None) -> Iterator[Event]:
        """Yield the events of the end of the open block, whose text is complete."""


class ResponseBuilder(AnswerBuilder, abc.ABC):
    """Builder of OpenAI's objects: the differences between completions and chat completions.

    Args:
        body: Request; its fields select the contents of choices.
        model: Name that the model is served under.
        vocabulary: Vocabulary that decodes tokens.
        answer_format: Format of the answers' thinking and tool calls.

    Attributes:
        PREFIX: Beginning of ids.
        shows_versions: Whether choices have the versions of the weights.
        shows_routing: Whether choices have the experts of their tokens.
    """

    PREFIX: ClassVar[str]

    def __init__(
        self,
        body: CompletionRequest | ChatRequest,
        model: str,
        vocabulary: Vocabulary,
        answer_format: AnswerFormat = PLAIN,
    ) -> None:
        super().__init__(f"{self.PREFIX}-{uuid.uuid4().hex}", vocabulary, answer_format, body.n or 1)
        self.has_scores = body.logprobs is not None and body.logprobs is not False
        self.shows_versions = bool(body.return_weights_version)
        self.shows_routing = bool(body.return_routed_experts)
        self._shows_ids = bool(body.return_token_ids)
        self._fields = {"id": self.id, "created": int(time.time()), "model": model}

    def heading(self, source: Progress | RequestRecord) -> dict[str, object]:
        """Return the fields beside the choices in the first part of a response, and in a whole one."""
        return {}

    @abc.abstractmethod
    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """Return the fields around the choices."""

    @abc.abstractmethod
    def opening(self, index: int, first: Progress | RequestRecord) -> dict[str, object] | None:
        """Return the first part of a choice, before any text; `first` is the source of the prompt's first choice."""

    @abc.abstractmethod
    def part(self, index: int, piece: Piece) -> dict[str, object] | None:
        """Return a part of a choice; None if it would be empty."""

    @abc.abstractmethod
    def choice(self, index: int, record: RequestRecord, first: RequestRecord) -> dict[str, object]:
        """Return a choice of a response without stream; `first` is the record of the prompt's first choice."""

    def _ids(self, tokens: Sequence[int]) -> dict[str, object]:
        return {"token_ids": list(tokens)} if self._shows_ids else {}

    def _prompt_ids(self, source: Progress | RequestRecord) -> dict[str, object]:
        return {"prompt_token_ids": list(source.prompt_tokens)} if self._shows_ids else {}


def explained(builder: AnswerBuilder, index: int, record: RequestRecord) -> dict[str, object]:
    """Return a choice's field `prefix_cache_explanation`, or no field.

    It has positions, times of the request's own salt, and text of its own prompt; no token id.
    """
    explanation = record.prefix_cache_explanation
    if builder.explains is None or index % builder.choices or explanation is None:
        return {}
    around = excerpt(record.prompt_tokens, explanation.place, builder.explains)
    shown = {name: value for name, value in explanation.to_dict(around).items() if name not in ("here", "there")}
    is_dropped = builder.thinking_token is not None and explanation.there == builder.thinking_token
    if is_dropped and explanation.here != explanation.there:
        shown |= {"cause": DROPPED_THINKING, "advice": _DROPPED_THINKING_ADVICE}
        shown["text"] = f"{shown['text']}. {_DROPPED_THINKING_TEXT}"
    return {"prefix_cache_explanation": shown}


def versions_of(builder: ResponseBuilder, source: Progress | RequestRecord, start: int, end: int) -> dict[str, object]:
    """Return the versions of the weights behind the generated tokens [start, end), if requested: two fields."""
    if not builder.shows_versions:
        return {}
    found = {"weights_version": source.weights_version, "prefix_weights_version": source.prefix_weights_version}
    if source.generated_tokens:  # else the versions that scored the prompt
        found = {name: part_of(runs, start, end) for name, runs in found.items()}
    return {name: [list(run) for run in runs] for name, runs in found.items()}


def experts_of(builder: ResponseBuilder, record: RequestRecord) -> dict[str, object]:
    """Return the experts of all tokens but the last, cached ones included, if requested."""
    rows = record.routing_indices
    if not builder.shows_routing or rows is None:
        return {}
    data = base64.b64encode(rows.to_int16()).decode()
    return {"routed_experts": {"data": data, "dtype": "int16", "shape": [len(rows), rows.layers, rows.topk]}}


def whole(builder: ResponseBuilder, records: Sequence[RequestRecord]) -> dict[str, object]:
    """Return the whole response."""
    choices = [
        builder.choice(index, record, records[index - index % builder.choices])
        | explained(builder, index, record)
        | versions_of(builder, record, 0, len(record.generated_tokens))
        | experts_of(builder, record)
        for index, record in enumerate(records)
    ]
    envelope = builder.envelope(is_part=False) | builder.heading(records[0])
    return envelope | {"choices": choices, "usage": usage(builder, records)}


class CompletionResponseBuilder(ResponseBuilder):
    """Response builder of `/v1/completions`; see `ResponseBuilder`.

    Args:
        echoes: Prompt text of each choice, if it precedes the output.
    """

    PREFIX = "cmpl"

    def __init__(
        self, body: CompletionRequest, model: str, vocabulary: Vocabulary, echoes: Sequence[str] | None = None
    ) -> None:
        super().__init__(body, model, vocabulary)
        self._echoes = echoes
        self._lengths: dict[int, int] = {}  # characters of the text so far, by choice

    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """Return the fields around the choices."""
        return {"object": "text_completion", **self._fields}

    def opening(self, index: int, first: Progress | RequestRecord) -> dict[str, object] | None:
        """Return the prompt, if echoed, and its ids, if requested."""
        if self._echoes is None and not self._shows_ids:
            return None
        echo = "" if self._echoes is None else self._echoes[index]
        return self._choice(index, [Piece(echo, scores=self._prompt_scores(first))]) | self._prompt_ids(first)

    def part(self, index: int, piece: Piece) -> dict[str, object] | None:
        """Return a part of a choice."""
        return self._choice(index, [piece])

    def choice(self, index: int, record: RequestRecord, first: RequestRecord) -> dict[str, object]:
        """Return a choice of a response without stream; `first` is the record of the prompt's first choice."""
        echo = "" if self._echoes is None else self._echoes[index]
        prompt = Piece(echo, scores=self._prompt_scores(first))
        scores = generated_scores(record, 0)
        answer = Piece(record.generated_text, record.generated_tokens, scores, record.finish_reason)
        return self._choice(index, [prompt, answer]) | self._prompt_ids(record)

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, object]:
        """Return a choice, or a part of it, whose text is the one of `pieces`."""
        text, last = "".join(piece.text for piece in pieces), pieces[-1]
        log_probs = self._log_probs(index, pieces) if self.has_scores else None
        fields = {"index": index, "text": text, "logprobs": log_probs, "finish_reason": last.reason}
        return fields | self._ids(last.tokens)

    def _prompt_scores(self, first: Progress | RequestRecord) -> list[Scored]:
        return prompt_scores(first) if self.has_scores and self._echoes is not None else []

    def _log_probs(self, index: int, pieces: Sequence[Piece]) -> dict[str, object]:
        """Return the log-probs of all tokens, even of tokens that the text does not show: clients count them."""
        offsets: list[int] = []
        length = self._lengths.get(index, 0)
        for piece in pieces:
            for one in scored_parts(self.vocabulary, piece.scores, piece.text):
                begun = sum(byte & 0xC0 != 0x80 for byte in one.data)  # characters
                offsets.append(length - (bool(one.data) and one.data[0] & 0xC0 == 0x80))
                length += begun
            self._lengths[index] = length = self._lengths.get(index, 0) + len(piece.text)
        scores = [score for piece in pieces for score in piece.scores]
        return {
            "tokens": [self.vocabulary.token_text(one.token) for one in scores],
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
        return {self.vocabulary.token_text(token): finite(log_prob) for token, log_prob in ranked}


class ChatResponseBuilder(ResponseBuilder):
    """Response builder of `/v1/chat/completions`."""

    PREFIX = "chatcmpl"

    @cached_property
    def _readers(self) -> list[AnswerReader]:
        """Reader of each choice."""
        return [AnswerReader(self._answer_format, self.vocabulary) for _ in range(self.choices)]

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
        thinking, content, log_probs = part.thinking, part.content, self._log_probs(part)
        delta: dict[str, object] = _thinking(thinking) if thinking else {}
        if content:
            delta["content"] = content
        if calls := part.calls:
            delta["tool_calls"] = [_call_part(call) for call in calls]
        has_scores = log_probs is not None and bool(log_probs["content"])
        if not delta and reason is None and not has_scores and not self._shows_ids and not self.shows_versions:
            return None
        return {"index": index, "delta": delta, "logprobs": log_probs, "finish_reason": reason} | self._ids(
            piece.tokens
        )

    def choice(self, index: int, record: RequestRecord, first: RequestRecord) -> dict[str, object]:
        """Return a choice of a response without stream; `first` is the record of the prompt's first choice."""
        scores = generated_scores(record, 0)
        piece = Piece(record.generated_text, record.generated_tokens, scores, record.finish_reason or "")
        part, reason = self._read(index, piece)
        calls = part.calls
        text = part.content or (None if calls else "")
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if self._readers[index].has_thought:
            message |= _thinking(part.thinking)
        if calls:
            message["tool_calls"] = [_whole_call(call) for call in calls]
        log_probs = self._log_probs(part)
        both = {}
        # Under Megatron's names; in a message, which a client may send back, if they read as the message.
        if self._shows_ids:
            both = {**self._prompt_ids(first), "generation_token_ids": list(piece.tokens)}
        return (
            {
                "index": index,
                "message": message | (both if record.stop_word is None else {}),
                "logprobs": log_probs,
                "finish_reason": reason or None,
            }
            | both
            | self._ids(piece.tokens)
        )

    def _read(self, index: int, piece: Piece) -> tuple[AnswerPiece, str | None]:
        """Return what a piece has made certain, and the finish reason: None until the choice has ended."""
        reader = self._readers[index]
        found = reader.read(piece)
        has_called = reader.call_count and piece.reason == "stop"
        return found, CALLED if has_called else piece.reason

    def _log_probs(self, found: AnswerPiece) -> dict[str, object] | None:
        """Return the log-probs of the content's tokens; of all tokens where their ids are shown, too."""
        if not self.has_scores:
            return None
        scores = found.scores if self._shows_ids else found.content_scores
        return {"content": [one.to_dict(self.vocabulary) for one in scores], "refusal": None}


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
