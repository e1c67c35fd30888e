"""A request and where it stands.

Everything is counted in tokens, in half-open intervals over prompt and generation together:

    0                    prompt_length            len(tokens)
    |------ prompt ------|------ generated -------|
    |--- computed ---|-- the step's chunk --|
    0         computed_end == chunk.start   chunk.end

Tokens below `computed_end` have their KV in the block table and their state in the live slot. A request whose chunk
ends at `len(tokens)` gets a new token from that step. Tokens below `shared_end` lie in blocks that others may use:
their KV is never written.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_ext.config import RequestParams
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import Digest, HashChain
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.scheduling.accounting import PrefillLedger
from megatron_ext.scheduling.events import Event, EventType
from megatron_ext.scheduling.live_slots import LiveSlot
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.snapshots import Snapshot


@dataclass(eq=False)
class Request:
    """One request from submission to its end; preemptions and suspensions leave it the same object.

    Args:
        arrival: Rank of submission; the lower goes first.
        seed: Of the request's own random generator.
        termination_id: The token that ends generation, or None.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    params: RequestParams
    arrival: int
    seed: int | str
    termination_id: int | None = None
    prompt_text: str | None = None

    tokens: list[int] = field(init=False)
    computed_end: int = 0
    shared_end: int = 0
    published_blocks: int = 0  # of the block table, from its start
    chain: HashChain | None = None  # None: neither reads nor writes the cache
    cache_epoch: int | None = None  # of the cache when the request was admitted
    has_waited_for_prefix: bool = False  # has waited for another request's prefix
    block_table: list[BlockId] = field(default_factory=list)
    live_slot: LiveSlot | None = None
    restore: Restore | None = None  # to copy into the live slot before the first chunk
    snapshots: list[Snapshot] = field(default_factory=list)  # slots are reserved for them; none is taken yet
    decode_snapshot: Digest | None = None  # the last one taken while decoding
    generator: random.Random = field(init=False)
    _drawn: float | None = None  # the next token's number, once drawn

    status: Status | None = None  # None while it lives
    finish_reason: str | None = None
    error: str | None = None
    is_fault: bool = False  # the error is ours
    generated_text: str | None = None  # set when a stop word cuts the text
    events: list[Event] = field(default_factory=list)
    arrival_wall_time: float = field(default_factory=time.time)
    step_count: int = 0
    ledger: PrefillLedger = field(init=False)
    prompt_log_probs: list[float] = field(default_factory=list)
    generated_log_probs: list[float] = field(default_factory=list)
    prompt_top_n: list[dict[int, float]] = field(default_factory=list)
    generated_top_n: list[dict[int, float]] = field(default_factory=list)
    _end_timestamp: float | None = None  # seconds, of the events' clock

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_tokens)
        self.generator = random.Random(self.seed)
        self.ledger = PrefillLedger(self.prompt_length)
        self.add_event(EventType.ADD_ENGINE)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt as it was submitted."""
        return len(self.prompt_tokens)

    @property
    def generated_tokens(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]

    @property
    def generated_count(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def may_stop(self) -> bool:
        """Whether its next token may be the termination token, or complete a stop word."""
        return self.generated_count >= self.params.min_tokens

    @property
    def may_have_stopped(self) -> bool:
        """Whether its newest token may have been the termination token, or have completed a stop word."""
        return self.generated_count > self.params.min_tokens

    @property
    def reason_to_end(self) -> str | None:
        """Why its newest token is its last, by id or count; None if it goes on. Stop words are matched elsewhere."""
        if self.tokens[-1] == self.termination_id and self.may_have_stopped:
            return "stop"
        return "length" if self.generated_count >= self.params.num_tokens_to_generate else None

    @property
    def digests(self) -> Sequence[Digest]:
        """Digests of the complete blocks of `tokens`; none for a request that stays away from the cache."""
        return () if self.chain is None else self.chain.extend(self.tokens)

    @property
    def unhashed_tokens(self) -> int:
        """Tokens in complete blocks whose digests are yet to be made."""
        return 0 if self.chain is None else self.chain.unhashed(len(self.tokens))

    def hash_ahead(self, most: int) -> None:
        """Make the digests of the next complete blocks: of at most so many tokens, but of a block at least."""
        if self.chain is not None:
            self.chain.extend_by(self.tokens, most)

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token, a generated one, is left to compute."""
        return self.computed_end == len(self.tokens) - 1 and self.computed_end >= self.prompt_length

    @property
    def is_ended(self) -> bool:
        """Whether it has finished, failed or been aborted."""
        return self.status is not None

    @property
    def computed_prefill_tokens(self) -> int:
        """Prompt tokens computed for the first time."""
        return self.ledger.computed

    @property
    def skipped_prefill_tokens(self) -> int:
        """Prompt tokens that no layer computed."""
        return self.ledger.skipped

    @property
    def recomputed_tokens(self) -> int:
        """Tokens prefilled again after a preemption, a suspension or a failed step."""
        return self.ledger.recomputed

    @property
    def prefill_token_count(self) -> int:
        """Prefill tokens computed for it so far, for the first time or again."""
        return self.ledger.computed + self.ledger.recomputed

    @property
    def latency(self) -> float:
        """Seconds from submission to the end of a request that has ended."""
        return self._end_timestamp - self.events[0].timestamp

    @property
    def ttft(self) -> float | None:
        """Seconds from submission to the first token; None if none has come."""
        first = next((event for event in self.events if event.type is EventType.FIRST_TOKEN), None)
        return None if first is None else first.timestamp - self.events[0].timestamp

    def add_event(self, event_type: EventType, payload: str | None = None) -> None:
        """Note that something happens now."""
        self.events.append(Event.now(event_type, payload))

    def advance(self, end: int) -> None:
        """The tokens up to `end` have been computed."""
        self.ledger.compute(self.computed_end, end)
        self.computed_end = end
        self.restore = None
        self.step_count += 1

    def draw(self) -> float:
        """A uniform number in [0, 1) for the next token; the same again if the step that samples it is repeated."""
        if self._drawn is None:
            self._drawn = self.generator.random()
        return self._drawn

    def append(self, token: int) -> None:
        """A token was generated."""
        self._drawn = None
        if len(self.tokens) == self.prompt_length:
            self.add_event(EventType.FIRST_TOKEN)
        self.tokens.append(token)

    def end(self, status: Status, *, finish_reason: str | None = None, error: str | None = None) -> None:
        """Close the request's life."""
        assert self.status is None, f"request {self.request_id} ended twice"
        self._close(status, finish_reason, error)

    def revise(self, status: Status, *, finish_reason: str | None = None, error: str | None = None) -> None:
        """Another outcome of a request that has ended: its last token completes a stop word, or its text fails."""
        assert self.status is not None, f"request {self.request_id} is still alive"
        if self.events[-1].type is EventType.FINISH:  # nobody has been told
            self.events.pop()
        self._close(status, finish_reason, error)

    def _close(self, status: Status, finish_reason: str | None, error: str | None) -> None:
        self.status, self.finish_reason, self.error = status, finish_reason, error
        if status is Status.COMPLETED:
            self.add_event(EventType.FINISH)
        elif status is Status.FAILED:
            self.add_event(EventType.ERROR_NONTRANSIENT, error)
            self.add_event(EventType.FAIL)
        self._end_timestamp = time.monotonic()

    def to_record(self, generated_text: str, prompt_text: str) -> RequestRecord:
        """The outcome, for the user."""
        assert self.status is not None, f"request {self.request_id} is still alive"
        log_probs = self.params.return_log_probs
        top_n = self.params.top_n_logprobs > 0
        prompt_log_probs = self.params.wants_prompt_log_probs
        return RequestRecord(
            request_id=self.request_id,
            status=self.status,
            prompt_text=self.prompt_text if self.prompt_text is not None else prompt_text,
            prompt_tokens=self.prompt_tokens,
            generated_text=generated_text,
            generated_tokens=tuple(self.generated_tokens),
            finish_reason=self.finish_reason,
            error=self.error,
            events=tuple(self.events),
            arrival_wall_time=self.arrival_wall_time,
            latency=self.latency,
            ttft=self.ttft,
            step_count=self.step_count,
            matched_block_count=self.ledger.matched_blocks or 0,
            skipped_prefill_token_count=self.ledger.skipped,
            computed_prefill_token_count=self.ledger.computed,
            recomputed_token_count=self.ledger.recomputed,
            prefill_reasons=dict(self.ledger.reasons),
            prompt_log_probs=tuple(self.prompt_log_probs) if prompt_log_probs else None,
            generated_log_probs=tuple(self.generated_log_probs) if log_probs else None,
            prompt_top_n_log_probs=tuple(self.prompt_top_n) if top_n and prompt_log_probs else None,
            generated_top_n_log_probs=tuple(self.generated_top_n) if top_n else None,
            is_fault=self.is_fault,
        )


@dataclass(frozen=True)
class Chunk:
    """The tokens [start, end) of a request that one step computes."""

    request: Request
    start: int
    end: int

    @property
    def length(self) -> int:
        """Tokens."""
        return self.end - self.start

    @property
    def is_decode(self) -> bool:
        """Whether this is one generated token on top of a live state."""
        return self.length == 1 and self.start >= self.request.prompt_length

    @property
    def yields_token(self) -> bool:
        """Whether the step computes the request's last known token, so that the next one can be sampled."""
        return self.end == len(self.request.tokens)
