"""A request from submission to its end, in parts with one writer each.

submission   what was asked for                                      nobody: it is frozen
sequence     tokens, intervals, blocks, running state slot, snapshots         the scheduler
timeline     events, times, steps                                    the scheduler; the end, whoever ends it
output       text cut by a stop word, log-probs                      the output processor
outcome      how it ended                                            whoever ends it, once; revised before the report
"""

from __future__ import annotations

import dataclasses
from collections import abc

from megatron_ext.config import RequestParams
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.record import Outcome, Output, RequestRecord, Status
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.scheduling.sequence import Sequence
from megatron_ext.scheduling.submission import Submission
from megatron_ext.scheduling.timeline import Timeline


class Request:
    """One request; preemptions and suspensions leave it the same object. Its properties only read its parts."""

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.sequence = Sequence(submission.prompt_tokens, submission.seed)
        self.timeline = Timeline()
        self.output = Output()
        self.outcome: Outcome | None = None  # while it lives

    @property
    def request_id(self) -> int:
        """See `Submission`."""
        return self.submission.request_id

    @property
    def params(self) -> RequestParams:
        """See `Submission`."""
        return self.submission.params

    @property
    def arrival(self) -> int:
        """See `Submission`."""
        return self.submission.arrival

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """See `Submission`."""
        return self.submission.prompt_tokens

    @property
    def prompt_length(self) -> int:
        """See `Sequence`."""
        return self.sequence.prompt_length

    @property
    def tokens(self) -> abc.Sequence[int]:
        """Of prompt and generation."""
        return self.sequence.tokens

    @property
    def computed_end(self) -> int:
        """Tokens below it are computed or skipped."""
        return self.sequence.computed_end

    @property
    def block_table(self) -> abc.Sequence[BlockId]:
        """The blocks that it owns, in order."""
        return self.sequence.block_table

    @property
    def block_hashes(self) -> abc.Sequence[BlockHash]:
        """Of the complete blocks of `tokens`."""
        return self.sequence.block_hashes

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token, a generated one, is left to compute."""
        return self.sequence.is_decoding

    @property
    def generated_tokens(self) -> list[int]:
        """Tokens generated so far."""
        return self.sequence.tokens[self.prompt_length :]

    @property
    def generated_count(self) -> int:
        """Tokens generated so far."""
        return self.sequence.generated_count

    @property
    def computed_prefill_tokens(self) -> int:
        """Prompt tokens computed for the first time."""
        return self.sequence.ledger.computed

    @property
    def skipped_prefill_tokens(self) -> int:
        """Prompt tokens that no layer computed."""
        return self.sequence.ledger.skipped

    @property
    def prefill_token_count(self) -> int:
        """Prefill tokens computed for it so far, for the first time or again."""
        return self.sequence.ledger.prefilled

    @property
    def is_ended(self) -> bool:
        """Whether it has finished, failed or been aborted."""
        return self.outcome is not None

    @property
    def status(self) -> Status | None:
        """How it ended; None while it lives."""
        return None if self.outcome is None else self.outcome.status

    @property
    def finish_reason(self) -> str | None:
        """Why it completed; None if it did not."""
        return None if self.outcome is None else self.outcome.finish_reason

    @property
    def lacks_mask(self) -> bool:
        """Whether its output is structured and the mask of its next token is still being computed."""
        return self.params.form is not None and not self.sequence.masks

    # Where it may stop

    @property
    def may_stop(self) -> bool:
        """Whether its next token may be one that ends it, or complete a stop word."""
        return self.generated_count >= self.params.min_tokens

    @property
    def may_have_stopped(self) -> bool:
        """Whether its newest token may have been one that ends it, or have completed a stop word."""
        return self.generated_count > self.params.min_tokens

    @property
    def reason_to_end(self) -> str | None:
        """Why its newest token is its last, by id or count; None if it goes on. Stop words are matched elsewhere.

        One that generates nothing ends with its prompt.
        """
        count, limit = self.generated_count, self.params.num_tokens_to_generate
        if limit == 0:  # it was to be computed, and scored if somebody asked
            return "length" if self.computed_end == self.prompt_length else None
        if count and self.tokens[-1] in self.submission.end_ids and self.may_have_stopped:
            return "stop"
        return "length" if count >= limit else None

    def ends_with(self, token: int, ahead: int) -> bool:
        """Whether a token ends it that is generated when it has so many more than now, itself counted."""
        return token in self.submission.end_ids and self.generated_count + ahead > self.params.min_tokens

    # What happens to it

    def advance(self, end: int) -> int:
        """The tokens up to `end` have been computed; how many of them are prefill."""
        self.timeline.step_count += 1
        return self.sequence.advance(end)

    def append(self, token: int) -> None:
        """A token was generated."""
        if self.generated_count == 0:
            self.timeline.note(EventType.FIRST_TOKEN)
        if self.params.track_generated_token_events:
            self.timeline.note(EventType.GENERATED_TOKEN, {"token_id": token})
        self.sequence.append(token)

    def cut(self, count: int) -> None:
        """Of the tokens that a step gave to a request that has ended, only those up to the `count`-th came.

        A stop word ends it there; nobody has been told of the others.
        """
        assert self.is_ended, "its blocks are made of these tokens"
        surplus = self.generated_count - count
        if self.params.track_generated_token_events:
            self.timeline.take_back_tokens(surplus)
        self.timeline.accepted -= surplus  # they came as drafts, all but the last one
        self.sequence.cut(surplus)

    def end(
        self,
        status: Status,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        is_fault: bool = False,
    ) -> None:
        """Close the request's life; see `Outcome`."""
        assert self.outcome is None, f"request {self.request_id} ended twice"
        self._close(Outcome(status=status, finish_reason=finish_reason, error=error, is_fault=is_fault))

    def revise(
        self,
        status: Status,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        is_fault: bool = False,
    ) -> None:
        """Another outcome of a request that has ended: its last token completes a stop word, or its text fails."""
        assert self.outcome is not None, f"request {self.request_id} is still alive"
        self.timeline.take_back_finish()
        self._close(Outcome(status=status, finish_reason=finish_reason, error=error, is_fault=is_fault))

    def _close(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if outcome.status is Status.COMPLETED:
            self.timeline.note(EventType.FINISH)
        elif outcome.status is Status.FAILED:
            self.timeline.note(EventType.ERROR_NONTRANSIENT, outcome.error)
            self.timeline.note(EventType.FAIL)
        self.timeline.close()

    # For the user

    def bare_record(self) -> RequestRecord:
        """The outcome with its tokens and its account, without texts made of them or log-probs."""
        assert self.outcome is not None, f"request {self.request_id} is still alive"
        ledger, timeline, outcome = self.sequence.ledger, self.timeline, self.outcome
        return RequestRecord(
            request_id=self.request_id,
            prompt_text=self.submission.prompt_text,
            prompt_tokens=self.prompt_tokens,
            status=outcome.status,
            finish_reason=outcome.finish_reason,
            error=outcome.error,
            is_fault=outcome.is_fault,
            generated_text="",
            generated_tokens=tuple(self.generated_tokens),
            events=tuple(timeline.events),
            arrival_wall_time=timeline.arrival_wall_time,
            latency=timeline.latency,
            ttft=timeline.ttft,
            step_count=timeline.step_count,
            matched_block_count=ledger.matched_blocks or 0,
            skipped_prefill_token_count=ledger.skipped,
            computed_prefill_token_count=ledger.computed,
            recomputed_token_count=ledger.recomputed,
            prefill_reasons=dict(ledger.reasons),
            draft_token_count=timeline.drafted,
            accepted_token_count=timeline.accepted,
            prefix_cache_explanation=ledger.explanation,
        )

    def to_record(self, generated_text: str) -> RequestRecord:
        """The outcome, for the user."""
        output, has_top_n = self.output, self.params.top_n_logprobs > 0
        has_prompt, has_generated = self.params.wants_prompt_log_probs, self.params.return_log_probs
        return dataclasses.replace(
            self.bare_record(),
            generated_text=generated_text,
            prompt_log_probs=tuple(output.prompt_log_probs) if has_prompt else None,
            generated_log_probs=tuple(output.generated_log_probs) if has_generated else None,
            prompt_top_n_log_probs=tuple(output.prompt_top_n) if has_top_n and has_prompt else None,
            generated_top_n_log_probs=tuple(output.generated_top_n) if has_top_n else None,
        )
