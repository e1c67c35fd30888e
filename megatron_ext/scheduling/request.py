"""Request from submission to its end: its tokens, how far they are computed, and the blocks and slots that they own.

Everything is counted in tokens, in half-open intervals over prompt and generation together:

    0                    prompt_length            len(tokens)
    |------ prompt ------|------ generated -------|
    |--- shared ---|                                          KV in blocks that others may use, never written
    |------ computed ------|-- the step's chunk --|           KV in the block table, states in the running state slot
    0              shared_end
                   computed_end == chunk.start    chunk.end

A request whose scheduled chunk ends at `len(tokens)` gets a new token from that step. `shared_end` may lie beyond
`computed_end`: the last token is computed even where its block is shared, and so are the tokens after the last
snapshot.
"""

from __future__ import annotations

import dataclasses
import random
from collections import abc
from dataclasses import dataclass, field
from typing import Final

from megatron_ext.config import RequestParams
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash, HashChain, packed_tokens
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.scheduling.accounting import PrefillLedger
from megatron_ext.scheduling.audit import AuditTarget
from megatron_ext.scheduling.record import Outcome, Output, RequestRecord, Status
from megatron_ext.scheduling.request_events import EventType, Timeline
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.running_slots import RunningSlot
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot, SnapshotPlan
from megatron_ext.scheduling.token_versions import TokenVersions

Masks = tuple[bytes, ...]  # a bit for each token id, the lowest first; see `Request`


class RequestRng:
    """Uniform numbers for sampling the tokens of one request, one per token, from a generator of its own.

    Args:
        seed: Seed; the numbers depend on nothing else.
        skipped: First numbers to skip: of tokens that were generated before the generator was made.
    """

    def __init__(self, seed: int | str, skipped: int = 0) -> None:
        self._generator = random.Random(seed)
        for _ in range(skipped):
            self._generator.random()
        self._next: list[float] = []  # of future tokens, in order

    def current(self, ahead: int = 0) -> float:
        """Return a number in [0, 1) for the next token; the same again if the step that samples it is repeated.

        Args:
            ahead: Offset from the next token; the token there keeps the number when its turn comes.
        """
        while len(self._next) <= ahead:
            self._next.append(self._generator.random())
        return self._next[ahead]

    def advance(self) -> None:
        """Go on to the number of the next token."""
        del self._next[:1]


@dataclass(eq=False)
class KeptProgress:
    """Data of a request that is kept with blocks; only the scheduler writes it.

    Attributes:
        kinds: Kinds that the request reads with cached blocks, and keeps with computed ones.
        resume_position: First position computed since the request was admitted.
        known_end: Position up to which the matched blocks had all data then.
        blocks: Blocks from its start that had all data then, or have been completed since.
        new: Blocks that had no data of some kind before its last step, each with its number in the sequence.
    """

    kinds: tuple[DataKind, ...] = ()
    resume_position: int = 0
    known_end: int = 0
    blocks: int = 0
    new: dict[BlockHash, int] = field(default_factory=dict)

    @property
    def keeps_log_probs(self) -> bool:
        """True if the log-probs of the prompt are kept, and may be read."""
        return DataKind.LOG_PROBS in self.kinds


class Request:
    """Request in the engine; the same object over preemptions and suspensions.

    Only the scheduler writes its attributes, where no other writer is named.

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
        tokens: Tokens of prompt and generation, packed for hashing.
        prompt_length: Tokens of the prompt as it was submitted.
        computed_end: Position below which tokens are computed or skipped (see the module, also for `shared_end`).
        published_blocks: Blocks of the block table that are published, from its start.
        chain: Chain of block hashes; None for a request that neither reads nor writes the cache.
        cache_epoch: Epoch of the cache when the request was admitted.
        block_table: Blocks owned, in order; replaced when that changes, so that a step's message keeps its version.
        running_slot: Running state slot; None while the request waits.
        restore: Snapshot to copy into the running state slot before the first chunk.
        snapshots: Snapshots with reserved slots that are not taken yet.
        snapshot_plan: Planned snapshots that do not follow from its position alone.
        draft_states: Slots of the states after its tokens while drafts are verified; then the one to continue from,
            unless that is the running state (`restore` says so, too).
        ledger: Account of prompt tokens.
        rng: Numbers that tokens are sampled with.
        masks: Token masks of a structured output: one bit per token id allowed next, then the same after each proposed
            draft; empty until they are known.
        kept: Progress of the data that is kept with blocks.
        timeline: Events, times, steps; the end is noted by the code that ends the request.
        versions: Versions of the weights that made its tokens; written by the replica.
        output: Text cut by a stop word, log-probs; written by the output processor.
        outcome: How it ended; set once at the end, and revised before the report.
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
        self.params: Final[RequestParams] = inputs.params
        self.prompt_tokens: Final[tuple[int, ...]] = inputs.prompt_tokens
        self.arrival: Final = arrival
        self.seed: Final = seed
        self.end_ids: Final = end_ids
        self.bad_words: Final = bad_words
        self.group: Final = group
        self.continued_tokens: Final = continued_tokens
        self.audit: Final = audit
        self.processes_logits: Final = inputs.params.processes_logits  # computed once, read at each token
        self.max_generated = inputs.params.num_tokens_to_generate
        self.tokens = packed_tokens(inputs.prompt_tokens)
        self.prompt_length: Final = len(self.tokens)
        self.tokens.extend(continued_tokens)
        self.computed_end = 0
        self.shared_end = 0
        self.published_blocks = 0
        self.chain: HashChain | None = None
        self.cache_epoch: int | None = None
        self.block_table: tuple[BlockId, ...] = ()
        self.running_slot: RunningSlot | None = None
        self.restore: Restore | None = None
        self.snapshots: list[Snapshot] = []
        self.snapshot_plan = SnapshotPlan()
        self.draft_states: tuple[Snapshot, ...] = ()
        self.ledger = PrefillLedger(self.prompt_length, len(self.tokens))
        self.rng = RequestRng(seed, len(continued_tokens))
        self.masks: Masks = ()
        self.kept = KeptProgress()
        self.timeline = Timeline()
        self.versions = TokenVersions()
        self.output = Output()
        self.outcome: Outcome | None = None  # None while it lives

    @property
    def block_hashes(self) -> abc.Sequence[BlockHash]:
        """Block hashes of the complete blocks of `tokens`; empty for a request that does not use the cache."""
        return () if self.chain is None else self.chain.extend(self.tokens)

    @property
    def unhashed_tokens(self) -> int:
        """Tokens in complete blocks that are not hashed yet."""
        return 0 if self.chain is None else self.chain.unhashed(len(self.tokens))

    @property
    def is_decoding(self) -> bool:
        """True if only the last token, a generated one, is left to compute."""
        return self.prompt_length <= self.computed_end == len(self.tokens) - 1

    @property
    def generated_tokens(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :].tolist()

    @property
    def generated_count(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.prompt_length

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
        if not kinds or not self.generated_count:
            return kinds
        return tuple(kind for kind in kinds if kind is not DataKind.LOG_PROBS)

    @property
    def lacks_mask(self) -> bool:
        """True if the output is structured and the mask of the next token is still being computed."""
        return self.params.response_format is not None and not self.masks

    # Stop conditions

    @property
    def reason_to_end(self) -> str | None:
        """Reason why the newest token is the last, by id or count; None if it is not. Stop words are matched elsewhere.

        A request that generates nothing ends with its prompt.
        """
        count, limit = self.generated_count, self.max_generated
        if limit == 0:  # the prompt was only to be computed, and scored if requested
            return "length" if self.computed_end == self.prompt_length else None
        if count and self.ends_with(self.tokens[-1], 0):
            return "stop"
        return "length" if count >= limit else None

    def ends_with(self, token: int, ahead: int) -> bool:
        """Return whether the `ahead`-th token from now would end the request if it were `token`."""
        return token in self.end_ids and self.generated_count + ahead > self.params.min_tokens

    # State changes

    def end_within(self, room: int) -> None:
        """End by length when `room` tokens are computed; the last token is never computed, so it needs no place."""
        self.max_generated = min(self.max_generated, room + 1 - self.prompt_length)

    def hash_ahead(self, max_tokens: int) -> None:
        """Hash the next complete blocks: at most `max_tokens` tokens, but at least one block."""
        if self.chain is not None:
            self.chain.extend_by(self.tokens, max_tokens)

    def advance(self, end: int) -> int:
        """Mark the tokens up to `end` as computed; return how many of them are prefill."""
        self.timeline.step_count += 1
        prefilled = self.ledger.compute(self.computed_end, end)
        self.computed_end = end
        self.restore = None
        return prefilled

    def append(self, token: int) -> None:
        """Append a generated token."""
        if self.generated_count == len(self.continued_tokens):
            self.timeline.note(EventType.FIRST_TOKEN)
        if self.params.track_generated_token_events:
            self.timeline.note(EventType.GENERATED_TOKEN, {"token_id": token})
        self.rng.advance()
        self.masks = ()
        self.tokens.append(token)

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
        del self.tokens[len(self.tokens) - surplus :]

    def reset(self) -> tuple[abc.Sequence[BlockId], list[Snapshot], RunningSlot | None]:
        """Reset the request to uncomputed and give up all that it owns.

        Returns:
            Blocks, reserved snapshots and running state slot that it owned, for return to their pools.
        """
        owned = self.block_table, self.snapshots, self.running_slot
        self.block_table, self.snapshots, self.running_slot, self.restore = (), [], None, None
        self.snapshot_plan.opportunistic, self.snapshot_plan.end_on_disk = (), 0
        self.draft_states = ()
        self.computed_end = self.shared_end = self.published_blocks = 0
        return owned

    def end(self, outcome: Outcome) -> None:
        """End the request."""
        assert self.outcome is None, f"request {self.request_id} ended twice"
        self._close(outcome)

    def revise(self, outcome: Outcome) -> None:
        """Replace the outcome of a request that has ended: its last token completes a stop word, or its text fails."""
        assert self.outcome is not None, f"request {self.request_id} is still alive"
        self.timeline.take_back_finish()
        self._close(outcome)

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
        ledger, timeline, outcome, output = self.ledger, self.timeline, self.outcome, self.output
        has_prompt, has_generated = self.params.wants_prompt_log_probs, self.params.return_log_probs
        has_top_n = self.params.top_n_logprobs > 0
        weights_version, prefix_weights_version = self.versions.runs(0, self.generated_count)
        return RequestRecord(
            request_id=self.request_id,
            params=self.params,
            seed=self.seed,
            prompt_text=self.inputs.prompt_text,
            prompt_tokens=self.prompt_tokens,
            **vars(outcome),
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
