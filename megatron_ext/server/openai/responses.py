"""Records of the engine as OpenAI's objects, whole and in parts."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.engine.updates import Progress
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.server.api_errors import FAULT, ApiError
from megatron_ext.server.client.request_handle import RequestHandle


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


def usage(builder: ResponseBuilder, records: Sequence[RequestRecord]) -> dict[str, object]:
    """OpenAI's usage, and why prompt tokens were computed; what became of drafts under its names for predictions.

    The choices of a prompt count its tokens once: as they were skipped and computed for the first of them.

    Args:
        reply: Says how many choices a prompt has, and whether to tell what was cached.
        records: Prompt by prompt, the choices of each side by side.
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
    drafted = sum(record.draft_token_count for record in records)
    if drafted:
        accepted = sum(record.accepted_token_count for record in records)
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    if builder.shows_cache:
        counts["prompt_tokens_details"] = {
            "cached_tokens": sum(record.skipped_prefill_token_count for record in firsts),
            "computed_tokens_by_reason": dict(reasons),
        }
    return counts


def usage_so_far(builder: ResponseBuilder, handles: Sequence[RequestHandle]) -> dict[str, int]:
    """The usage of an answer that goes on; what was cached is told at its end."""
    sources = [handle.record or handle.progress for handle in handles]
    prompt = sum(len(handle.spec.tokens) for handle in handles[:: builder.choices])
    generated = sum(len(source.generated_tokens) for source in sources if source is not None)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


@dataclass(frozen=True)
class Piece:
    """What a part of a choice brings.

    Attributes:
        text: As far as it is certain; it may be empty.
        tokens: That have come since the piece before.
        scores: Of these tokens, if somebody asked.
        reason: Why the choice has ended, in its last piece.
    """

    text: str
    tokens: Sequence[int] = ()
    scores: Sequence[Scored] = ()
    reason: str | None = None


class ResponseBuilder(Protocol):
    """What differs between the two routes."""

    id: str
    choices: int  # of each prompt
    shows_cache: bool  # whether the usage says what was cached
    explains: Explains  # what choices say of why no more was skipped

    def heading(self, source: Progress | RequestRecord) -> dict[str, object]:
        """Fields beside the choices that the first part of an answer has, and a whole one."""

    def envelope(self, *, is_part: bool) -> dict[str, object]:
        """The fields around the choices."""

    def opening(self, index: int, first: Progress | RequestRecord) -> dict[str, object] | None:
        """The first part of a choice, before any text; `first` is of the prompt's first choice."""

    def part(self, index: int, piece: Piece) -> dict[str, object] | None:
        """A part of a choice; None if there is nothing to say yet."""

    def choice(self, index: int, record: RequestRecord, first: RequestRecord) -> dict[str, object]:
        """A whole choice; `first` is the prompt's first one, which has what is told of the prompt."""


class Explains(enum.Enum):
    """What the first choice of a prompt says of why the prompt skipped no more."""

    NOTHING = enum.auto()
    OWN = enum.auto()  # positions, and the asker's own tokens
    ALL = enum.auto()  # the cached token too, which may be somebody else's


def explained(builder: ResponseBuilder, index: int, record: RequestRecord) -> dict[str, object]:
    """A choice's field `prefix_cache_explanation`, if it has one."""
    said = record.prefix_cache_explanation
    if builder.explains is Explains.NOTHING or index % builder.choices or said is None:
        return {}
    told = said if builder.explains is Explains.ALL else said.without_there()
    return {"prefix_cache_explanation": told.to_dict()}


def whole(builder: ResponseBuilder, records: Sequence[RequestRecord]) -> dict[str, object]:
    """The answer in one piece."""
    choices = [
        builder.choice(index, record, records[index - index % builder.choices]) | explained(builder, index, record)
        for index, record in enumerate(records)
    ]
    envelope = builder.envelope(is_part=False) | builder.heading(records[0])
    return envelope | {"choices": choices, "usage": usage(builder, records)}
