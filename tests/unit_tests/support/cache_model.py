"""Reference model of a prefix cache, by brute force on token lists: no block hashes, no blocks of memory, no counters.

The contents of a block are everything before its end: the salt, and all tokens of the sequence up to there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_ext.config import EvictionPolicyName
from megatron_ext.scheduling.plan import Admission, StepPlan
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler

Contents = tuple[str | None, tuple[int, ...]]


def leading(wanted: Sequence[Contents], known: set[Contents]) -> int:
    """Number of `wanted` contents, from the start, that are in `known`."""
    return next((i for i, contents in enumerate(wanted) if contents not in known), len(wanted))


class Book:
    """EX-2: outcome of each prompt token of one request, token by token."""

    def __init__(self, request: Request, block_size: int) -> None:
        self.request = request
        self.block_size = block_size
        self.matched: list[int] = []  # blocks, at each admission
        self.labels: dict[int, str] = {}  # prompt position -> "skipped", or why it was computed
        self.known: set[int] = set()  # positions skipped or computed before
        self.recomputed = 0

    def admit(self, start: int, matched: int) -> None:
        self.matched.append(matched)
        for position in range(min(start, self.request.prompt_length)):
            self.labels.setdefault(position, "skipped")
        self.known |= set(range(start))

    def compute(self, start: int, end: int) -> None:
        for position in range(start, end):
            if position in self.known:
                self.recomputed += 1
            elif position < self.request.prompt_length:
                self.labels[position] = self._reason(position)
        self.known |= set(range(start, end))

    def _reason(self, position: int) -> str:
        length, params = self.request.prompt_length, self.request.params
        if not params.enable_prefix_caching:
            return "opted_out"
        if params.wants_prompt_log_probs:
            return "prompt_logprobs"
        if position < self.matched[-1] * self.block_size:
            assert position == length - 1, "a cached token that is not the last was computed"
            return "last_token"
        return "partial_block" if position >= length - length % self.block_size else "not_cached"

    @property
    def skipped(self) -> int:
        return sum(label == "skipped" for label in self.labels.values())

    def check(self, record: RequestRecord) -> None:
        """The request's own account says the same."""
        reasons = Counter(label for label in self.labels.values() if label != "skipped")
        assert record.prefill_reasons == reasons
        assert record.skipped_prefill_token_count == self.skipped
        assert record.computed_prefill_token_count == sum(reasons.values())
        assert record.recomputed_token_count == self.recomputed
        assert record.matched_block_count == (self.matched[0] if self.matched else 0)


class CacheModel:
    """Observer of one scheduler with caching on that compares each step's plan with token lists.

    Args:
        scheduler: Scheduler whose `schedule`, `_reset_cache` and the part of `commit` that publishes are wrapped.
        policy: With "lru", matches are exact until something has been evicted, and bounded from then on; with
            "ref_zero" also as to what is kept for requests that waited for it.
    """

    def __init__(self, scheduler: Scheduler, policy: EvictionPolicyName) -> None:
        self.scheduler = scheduler
        self.policy = policy
        self.block_size = scheduler.limits.block_size
        self.books: dict[int, Book] = {}
        self._ever: set[Contents] = set()
        self._kept: set[Contents] = set()
        self._promised: dict[int, int] = {}  # blocks that were published for waiting requests
        self._stale: set[int] = set()  # requests that run since before the last reset, and publish nothing
        self._schedule, self._advance = scheduler.schedule, scheduler._advance
        self._reset = scheduler._reset_cache
        scheduler.schedule, scheduler._advance, scheduler._reset_cache = self.schedule, self.advance, self.reset

    # What token lists say

    def contents(self, request: Request, end: int) -> list[Contents]:
        """Contents of the complete blocks of the first `end` tokens."""
        salt = request.params.cache_salt
        lengths = range(self.block_size, end + 1, self.block_size)
        return [(salt, tuple(request.tokens[:length])) for length in lengths]

    def _batch(self) -> list[Request]:
        """Requests in the batch whose blocks others may use."""
        queues = self.scheduler.queues
        batch = [*queues.running, *queues.paused]
        return [r for r in batch if r.params.enable_prefix_caching and r.request_id not in self._stale]

    def _in_use(self) -> set[Contents]:
        return {contents for request in self._batch() for contents in self.contents(request, request.computed_end)}

    def _being_computed(self) -> dict[Contents, set[int]]:
        """Contents -> the requests that will publish them before their first or next token."""
        leaders: dict[Contents, set[int]] = {}
        for request in self._batch():
            if not request.is_decoding:
                self._note_leader(leaders, request, request.computed_end)
        return leaders

    def _note_leader(self, leaders: dict[Contents, set[int]], request: Request, computed: int) -> None:
        wanted = self.contents(request, len(request.tokens))
        for contents in wanted[computed // self.block_size :]:
            leaders.setdefault(contents, set()).add(request.request_id)

    def _wanted(self, request: Request) -> list[Contents]:
        """Contents that the request would read from the cache if they were cached."""
        reads = request.params.enable_prefix_caching and not request.params.wants_prompt_log_probs
        return self.contents(request, len(request.tokens)) if reads else []

    def _bounds(self, wanted: list[Contents], in_use: set[Contents], has_evicted: bool) -> tuple[int, int]:
        """Fewest and most blocks that may match."""
        min_blocks, max_blocks = leading(wanted, in_use), leading(wanted, self._ever)
        if self.policy is EvictionPolicyName.REF_ZERO:
            max_blocks = leading(wanted, in_use | self._kept)
        return (min_blocks if has_evicted else max_blocks), max_blocks

    def _kept_for_followers(self) -> set[Contents]:
        """Contents that waiting requests have waited for; with "ref_zero" nothing else outlives its last user."""
        waiting, size = self.scheduler.queues.waiting, self.block_size
        return {
            contents
            for request in waiting
            for contents in self.contents(request, waiting.promised_blocks(request) * size)
        }

    # What the scheduler does

    def schedule(self) -> StepPlan:
        in_use, leaders, self._kept = self._in_use(), self._being_computed(), self._kept_for_followers()
        waiting = self.scheduler.queues.waiting
        self._promised = {request.request_id: waiting.promised_blocks(request) for request in waiting}
        has_evicted = self.scheduler.cache.use().blocks_evicted > 0
        plan = self._schedule()
        for admission in plan.admissions:
            bounds = self._bounds(self._wanted(admission.request), in_use, has_evicted)
            self._check_admission(admission, leaders, bounds)
        for deferral in plan.deferrals:
            if deferral.wait_for is not None:
                wanted = self._wanted(deferral.request)
                min_blocks, max_blocks = self._bounds(wanted, in_use, has_evicted)
                followed = [leaders.get(contents, set()) for contents in wanted[min_blocks : max_blocks + 1]]
                assert any(deferral.wait_for in ids for ids in followed), "its leader computes nothing for it"
        return plan

    def _check_admission(
        self, admission: Admission, leaders: dict[Contents, set[int]], bounds: tuple[int, int]
    ) -> None:
        """Check that matched and skipped counts are exact and that no other request computes the next block (KV-6)."""
        request, matched = admission.request, len(admission.matched)
        min_blocks, max_blocks = bounds
        assert min_blocks <= matched <= max_blocks, (
            f"request {request.request_id} matched {matched}, not {min_blocks} to {max_blocks}"
        )
        start = min(matched * self.block_size, len(request.tokens) - 1)
        assert admission.chunk.start == start, f"request {request.request_id} skipped {admission.chunk.start}"
        following = self._wanted(request)[matched : matched + 1]
        if matched >= self._promised.get(request.request_id, 0):  # a request that lost its blocks does not wait again
            computed_by = [leaders.get(contents) for contents in following]
            assert not any(computed_by), "admitted though another computes this block"
        self._stale.discard(request.request_id)
        if request.params.enable_prefix_caching:
            self._note_leader(leaders, request, matched * self.block_size)
        book = self.books.setdefault(request.request_id, Book(request, self.block_size))
        book.admit(start, matched)

    def advance(self, requests: Sequence[Request], ends: Sequence[int]) -> None:
        starts = [request.computed_end for request in requests]
        self._advance(requests, ends)
        for request, start, end in zip(requests, starts, ends, strict=True):
            self.books[request.request_id].compute(start, end)
        batch = self._batch()
        for request, end in zip(requests, ends, strict=True):
            if request in batch:
                self._ever |= set(self.contents(request, end))

    def reset(self) -> None:
        self._reset()
        self._ever.clear()
        self._stale = {r.request_id for r in [*self.scheduler.queues.running, *self.scheduler.queues.paused]}

    def shared_blocks(self, request: Request) -> set[int]:
        """Blocks that `request` found in the cache when it was admitted."""
        return set(request.block_table[: self.books[request.request_id].matched[-1]])

    def check(self, record: RequestRecord) -> None:
        """A request has ended: its account is right."""
        book = self.books.get(record.request_id)
        if book is not None:
            book.check(record)
        else:
            assert (record.skipped_prefill_token_count, record.computed_prefill_token_count) == (0, 0)
