"""Engine records as OpenAI's objects, whole and in parts."""

from __future__ import annotations

import abc
import base64
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.engine.pausing import ABORT
from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.token_versions import part_of
from megatron_ext.server.api_errors import FAULT, REQUEST_FAILED, ApiError, aborted
from megatron_ext.server.client.request_group import RequestHandle
from megatron_ext.server.openai.answers import PLAIN, AnswerFormat, thinking_length
from megatron_ext.text.detokenizer import excerpt
from megatron_ext.text.vocabulary import Vocabulary

DROPPED_THINKING = "dropped_thinking"
_DROPPED_THINKING_TEXT = "The chat template drops the thinking of an earlier turn, which the cached prefix has there"
_DROPPED_THINKING_ADVICE = "Use a chat template that keeps the thinking of earlier turns, or turn thinking off."


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
    if record.status is Status.ABORTED and not _is_whole(record):
        raise aborted()  # by an update of the weights
    return record


def _is_whole(record: RequestRecord) -> bool:
    """Return whether a pause has ended the request, and all its prompt's log-probs are known if it wants any."""
    scores = record.prompt_log_probs
    return record.finish_reason == ABORT and (scores is None or len(scores) == len(record.prompt_tokens) - 1)


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


class AnswerBuilder:
    """Base of the builders of answers: identity of an answer, and what of its records it shows.

    Args:
        answer_id: Id of the answer.
        vocabulary: Vocabulary that decodes tokens.
        answer_format: Format of the answer's thinking and tool calls.
        choices: Choices of each prompt.

    Attributes:
        shows_cache: Whether the usage has the number of cached tokens.
        explains: Decoder of the text in prefix cache explanations; None for no explanations.
        thinking_token: First token of thinking; None if the model does not think.
    """

    def __init__(
        self, answer_id: str, vocabulary: Vocabulary, answer_format: AnswerFormat = PLAIN, choices: int = 1
    ) -> None:
        self.id = answer_id
        self.choices = choices
        self.shows_cache = True
        self.explains: Callable[..., str] | None = None
        self.thinking_token: int | None = None
        self._vocabulary = vocabulary
        self._answer_format = answer_format

    def thinking_length(self, record: RequestRecord) -> int:
        """Return the number of an answer's tokens that are thinking, markers included."""
        decode = self._vocabulary.decoder(skips_special=False)
        return thinking_length(record.generated_tokens, self._answer_format, decode)


class ResponseBuilder(AnswerBuilder, abc.ABC):
    """Builder of OpenAI's objects: the differences between completions and chat completions.

    Args:
        prefix: Beginning of the id.
        model: Name that the model is served under.
        vocabulary: Vocabulary that decodes tokens.
        answer_format: Format of the answers.
        choices: Choices of each prompt.
        has_scores: Whether log-probs were requested.
        shows_ids: Whether token ids are returned as well.

    Attributes:
        shows_versions: Whether choices have the versions of the weights.
        shows_routing: Whether choices have the experts of their tokens.
    """

    def __init__(
        self,
        prefix: str,
        model: str,
        vocabulary: Vocabulary,
        answer_format: AnswerFormat,
        choices: int,
        *,
        has_scores: bool,
        shows_ids: bool,
    ) -> None:
        super().__init__(f"{prefix}-{uuid.uuid4().hex}", vocabulary, answer_format, choices)
        self.shows_versions = False
        self.shows_routing = False
        self.has_scores = has_scores
        self._shows_ids = shows_ids
        self._fields = {"id": self.id, "created": int(time.time()), "model": model}

    @abc.abstractmethod
    def heading(self, source: Progress | RequestRecord) -> dict[str, object]:
        """Return the fields beside the choices in the first part of a response, and in a whole one."""

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
