"""Request from submission to its end, in parts with one writer each.

inputs       prompt and parameters, and values derived from them     immutable
sequence     tokens, intervals, blocks, running state slot, snapshots         the scheduler
kept         progress of the data that is kept with blocks                    the scheduler
timeline     events, times, steps                                    the scheduler; the end, by the code that ends it
versions     versions of the weights that made its tokens            the replica
output       text cut by a stop word, log-probs                      the output processor
outcome      how it ended                                            set once at the end; revised before the report
"""

from __future__ import annotations

import dataclasses
from collections import abc
from typing import Final

from megatron_ext.config import RequestParams
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.scheduling.audit import AuditTarget
from megatron_ext.scheduling.kept_progress import KeptProgress
from megatron_ext.scheduling.record import Outcome, Output, RequestRecord, Status
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.sequence import Sequence
from megatron_ext.scheduling.timeline import Timeline
from megatron_ext.scheduling.token_versions import TokenVersions


class Request:
    """Request in the engine; the same object over preemptions and suspensions. Its properties only read its parts.

    Args:
        request_id: Unique among living requests.
        inputs: What the caller asks for.
        arrival: Rank of arrival; the lower goes first.
        seed: Seed of the request's own random generator.
        end_ids: Token ids each of which ends generation.
        bad_words: Bad words of the params as token ids, each in all variants of its beginning.
        group: Number that requests of equal prompts and salts share, of which one computes the prompt for all; None for
            a request without such others.
        continued_tokens: First tokens of the output, which an earlier request has generated; the numbers of the seed
            that they were sampled with are skipped.
        audit: Cached entries to compare with what the request computes; None for a request of a caller.

    Attributes:
        max_generated: Generated tokens with which it ends by length; see `end_within`.
    """

    def __init__(
        self,
        request_id: int,
        inputs: RequestInputs,
        arrival: int,
        seed: int | str,
        *,
        end_ids: tuple[int, ...] = (),
        bad_words: tuple[tuple[int, ...], ...] = (),
        group: int | None = None,
        continued_tokens: tuple[int, ...] = (),
        audit: AuditTarget | None = None,
    ) -> None:
        self.request_id: Final = request_id
        self.inputs: Final = inputs
        self.arrival: Final = arrival
        self.seed: Final = seed
        self.end_ids: Final = end_ids
        self.bad_words: Final = bad_words
        self.group: Final = group
        self.continued_tokens: Final = continued_tokens
        self.audit: Final = audit
        self.processes_logits: Final = inputs.params.processes_logits  # computed once, read at each token
        self.max_generated = inputs.params.num_tokens_to_generate
        self.sequence = Sequence(inputs.prompt_tokens, seed, continued_tokens)
        self.kept = KeptProgress()
        self.timeline = Timeline()
        self.versions = TokenVersions()
        self.output = Output()
        self.outcome: Outcome | None = None  # None while it lives

    @property
    def params(self) -> RequestParams:
        """Sampling parameters and other options."""
        return self.inputs.params

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """Tokens of the prompt."""
        return self.inputs.prompt_tokens

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens; see `Sequence`."""
        return self.sequence.prompt_length

    @property
    def tokens(self) -> abc.Sequence[int]:
        """Tokens of prompt and generation."""
        return self.sequence.tokens

    @property
    def computed_end(self) -> int:
        """Position below which all tokens are computed or skipped."""
        return self.sequence.computed_end

    @property
    def block_table(self) -> abc.Sequence[BlockId]:
        """Blocks that the request owns, in order."""
        return self.sequence.block_table

    @property
    def block_hashes(self) -> abc.Sequence[BlockHash]:
        """Block hashes of the complete blocks of `tokens`."""
        return self.sequence.block_hashes

    @property
    def is_decoding(self) -> bool:
        """True if only the last token, a generated one, is left to compute."""
        return self.sequence.is_decoding

    @property
    def generated_tokens(self) -> list[int]:
        """Tokens generated so far."""
        return self.sequence.tokens[self.prompt_length :].tolist()

    @property
    def generated_count(self) -> int:
        """Number of tokens generated so far."""
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
        """Prefill tokens computed so far, for the first time or again."""
        return self.sequence.ledger.prefilled

    @property
    def is_ended(self) -> bool:
        """True if the request has finished, failed or been aborted."""
        return self.outcome is not None

    @property
    def status(self) -> Status | None:
        """Final status; None while the request lives."""
        return None if self.outcome is None else self.outcome.status

    @property
    def finish_reason(self) -> str | None:
        """Reason of completion; None if the request did not complete."""
        return None if self.outcome is None else self.outcome.finish_reason

    @property
    def needed_data(self) -> tuple[DataKind, ...]:
        """Kinds of data that cached blocks must have to be skipped; log-probs count for the prompt only."""
        kinds = self.kept.kinds
        if not kinds or not self.sequence.generated_count:
            return kinds
        return tuple(kind for kind in kinds if kind is not DataKind.LOG_PROBS)

    @property
    def lacks_mask(self) -> bool:
        """True if the output is structured and the mask of the next token is still being computed."""
        return self.params.response_format is not None and not self.sequence.masks

    # Stop conditions

    @property
    def may_stop(self) -> bool:
        """True if the next token may be an end token or complete a stop word."""
        return self.generated_count >= self.params.min_tokens

    @property
    def may_have_stopped(self) -> bool:
        """True if the newest token may have been an end token or have completed a stop word."""
        return self.generated_count > self.params.min_tokens

    @property
    def reason_to_end(self) -> str | None:
        """Reason why the newest token is the last, by id or count; None if it is not. Stop words are matched elsewhere.

        A request that generates nothing ends with its prompt.
        """
        count, limit = self.generated_count, self.max_generated
        if limit == 0:  # the prompt was only to be computed, and scored if requested
            return "length" if self.computed_end == self.prompt_length else None
        if count and self.tokens[-1] in self.end_ids and self.may_have_stopped:
            return "stop"
        return "length" if count >= limit else None

    def ends_with(self, token: int, ahead: int) -> bool:
        """Return whether the `ahead`-th token from now would end the request if it were `token`."""
        return token in self.end_ids and self.generated_count + ahead > self.params.min_tokens

    # State changes

    def end_within(self, room: int) -> None:
        """End by length when `room` tokens are computed; the last token is never computed, so it needs no place."""
        self.max_generated = min(self.max_generated, room + 1 - self.prompt_length)

    def advance(self, end: int) -> int:
        """Mark the tokens up to `end` as computed; return how many of them are prefill."""
        self.timeline.step_count += 1
        return self.sequence.advance(end)

    def append(self, token: int) -> None:
        """Append a generated token."""
        if self.generated_count == len(self.continued_tokens):
            self.timeline.note(EventType.FIRST_TOKEN)
        if self.params.track_generated_token_events:
            self.timeline.note(EventType.GENERATED_TOKEN, {"token_id": token})
        self.sequence.append(token)

    def forget_scores(self) -> None:
        """Forget the log-probs of a prompt that is computed again before its first token, maybe with other weights."""
        if not self.generated_count:
            self.output.prompt_log_probs.clear()
            self.output.prompt_top_n.clear()

    def cut(self, count: int) -> None:
        """Drop the tokens after the `count`-th generated one from a request that has ended.

        A stop word ends it there; the dropped tokens of that step have not been reported.
        """
        assert self.is_ended, "its blocks are made of these tokens"
        surplus = self.generated_count - count
        if self.params.track_generated_token_events:
            self.timeline.take_back_tokens(surplus)
        self.timeline.accepted -= surplus  # all but the last token were accepted drafts
        self.sequence.cut(surplus)

    def end(
        self,
        status: Status,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        is_fault: bool = False,
    ) -> None:
        """End the request with an outcome; see `Outcome`."""
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
        """Replace the outcome of a request that has ended: its last token completes a stop word, or its text fails."""
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

    # Records

    def bare_record(self) -> RequestRecord:
        """Return the record with tokens, log-probs and accounting, without text and routing indices."""
        assert self.outcome is not None, f"request {self.request_id} is still alive"
        ledger, timeline, outcome, output = self.sequence.ledger, self.timeline, self.outcome, self.output
        has_prompt, has_generated = self.params.wants_prompt_log_probs, self.params.return_log_probs
        has_top_n = self.params.top_n_logprobs > 0
        weights_version, prefix_weights_version = self.versions.runs(0, self.generated_count)
        return RequestRecord(
            request_id=self.request_id,
            params=self.params,
            seed=self.seed,
            prompt_text=self.inputs.prompt_text,
            prompt_tokens=self.prompt_tokens,
            status=outcome.status,
            finish_reason=outcome.finish_reason,
            error=outcome.error,
            is_fault=outcome.is_fault,
            generated_text="",
            generated_tokens=tuple(self.generated_tokens),
            prompt_log_probs=tuple(output.prompt_log_probs) if has_prompt else None,
            generated_log_probs=tuple(output.generated_log_probs) if has_generated else None,
            prompt_top_n_log_probs=tuple(output.prompt_top_n) if has_top_n and has_prompt else None,
            generated_top_n_log_probs=tuple(output.generated_top_n) if has_top_n else None,
            weights_version=weights_version,
            prefix_weights_version=prefix_weights_version,
            events=tuple(timeline.events),
            arrival_wall_time=timeline.arrival_wall_time,
            latency=timeline.latency,
            ttft=timeline.ttft,
            step_count=timeline.step_count,
            matched_block_count=ledger.matched_blocks or 0,
            skipped_prefill_token_count=ledger.skipped,
            skipped_from_disk_token_count=ledger.skipped_from_disk,
            computed_prefill_token_count=ledger.computed,
            recomputed_token_count=ledger.recomputed,
            prefill_reasons=dict(ledger.reasons),
            draft_token_count=timeline.drafted,
            accepted_token_count=timeline.accepted,
            prefix_cache_explanation=ledger.explanation,
        )

    def to_record(self, generated_text: str) -> RequestRecord:
        """Return the complete record for the user."""
        output = self.output
        return dataclasses.replace(
            self.bare_record(),
            generated_text=generated_text,
            stop_word=output.stop_word,
            routing_indices=None if output.routing is None else output.routing.up_to(len(self.tokens) - 1),
        )
