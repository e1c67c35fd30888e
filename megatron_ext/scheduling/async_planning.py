"""The step behind the one that is being computed, before the tokens of that one are known (CU-6).

    step n        decodes, and prefills that end: every chunk yields a token
    step n + 1    who goes on unless that token ends it: a decode of that token each, and nothing else

A request whose token turns out to end it has a *discarded* row in step n + 1: it is computed, and nothing comes of it.
Nothing that the row writes is anybody's: keys go behind all that is published, states to its running state slot, and
whoever gets these blocks and slots next writes them in a later step.

Where something else might happen in step n + 1 there is no foresight, and it is planned when step n is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.scheduling.block_hasher import BlockHasher
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.logits_options import reads_tokens
from megatron_ext.scheduling.plan import SchedulerLimits, SnapshotRequest, StepPlan
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.spec_decode.draft_slots import DraftSlots

_ARRIVAL = attrgetter("request.arrival")
Chunks = tuple[Chunk, ...]


def plan_of(chunks: Chunks) -> StepPlan:
    """A step that decodes, and changes nothing else."""
    return StepPlan(
        preemptions=(), pauses=(), resumes=(), failures=(), admissions=(), chunks=chunks, snapshots=(), deferrals=()
    )


class AsyncPlanner:
    """A part of the scheduler, for engines that launch a step while another one is computed.

    Args:
        limits: The engine's.
        queues: Of the scheduler, as the rest.
        cache: Its free blocks.
        hashing: Goes on in steps that are not planned, too.
        counters: Where steps are counted.
    """

    def __init__(
        self, limits: SchedulerLimits, queues: Queues, cache: PrefixCache, hashing: BlockHasher, counters: Counters
    ) -> None:
        self._limits = limits
        self._queues = queues
        self._cache = cache
        self._hashing = hashing
        self._counters = counters
        self._turned_away: tuple[Request, int, int] | None = None  # for want of blocks; see `_chances`
        first = 0 if cache.states is None else cache.states.total + limits.draft_states + 1  # behind that of padding
        self._slots = DraftSlots(first, limits.async_states)
        self._lent: list[tuple[Request, Snapshot]] = []

    @property
    def states(self) -> dict[int, Snapshot]:
        """Request id -> where its states go in the step that was foreseen last, if they are to be kept."""
        return {request.request_id: state for request, state in self._lent}

    def note(self, plan: StepPlan) -> None:
        """A step has been planned, and the plan put into effect: who lacks blocks, until there are more for it."""
        first = plan.deferral
        is_stuck = first is not None and first.resource == "blocks"
        self._turned_away = (first.request, *self._chances(first.request)) if first is not None and is_stuck else None

    def plan_next(self, computed: Sequence[Chunk]) -> Chunks:
        """The step behind the one that computes these chunks, and what it needs; empty if that is not certain.

        Blocks stay with their requests whatever comes of the step. Where none is free one is evicted, as planning the
        step would do; if the request ends before, the next one who needs a block finds that one free. Slots are lent
        until the step is adopted or forgone.

        Args:
            computed: Chunks of living requests.
        """
        chunks = self._certain(computed)
        missing = [self._missing(chunk) for chunk in chunks]
        ending = [chunk for chunk in chunks if self._leaves_states(chunk)]
        if sum(missing) > self._cache.available_count or len(ending) > self._slots.free_count:
            return ()
        for chunk, count in zip(chunks, missing, strict=True):
            if count:
                chunk.request.sequence.block_table += tuple(self._cache.allocate(count))
        for chunk in ending:
            state = Snapshot(chunk.end, self._slots.name(), self._slots.take())
            self._lent.append((chunk.request, state))
        return chunks

    def adopt(self) -> list[Snapshot]:
        """The step that was foreseen is the one that is computed now: what planning it would have done beside.

        Returns:
            Its snapshots, whose block hashes are known by now.
        """
        self._hashing.go_on()
        self._counters.launched_ahead += 1
        lent, self._lent = self._lent, []
        named = []
        for request, state in lent:
            found = self._named(request, state)
            if found is None:
                self._slots.give_back([state.slot])
            else:
                named.append(found)
        return named

    def forgo(self) -> None:
        """Nothing comes of the step that was foreseen."""
        self._slots.give_back(state.slot for _, state in self._lent)
        self._lent.clear()

    def _named(self, request: Request, state: Snapshot) -> Snapshot | None:
        """The snapshot by its block hash, reserved as if its step were planned now; None if it is not worth a slot.

        The slot that is reserved for it is lent from now on, and the one that is written is the index's (see
        `StateIndex.exchange`).
        """
        sequence, index = request.sequence, self._cache.states
        assert index is not None, "states of a model without recurrent layers"
        if request.is_ended or sequence.cache_epoch != self._cache.epoch:
            return None
        block_hash = request.block_hashes[state.position // self._limits.block_size - 1]
        wanted = SnapshotRequest(
            request, state.position, block_hash, Rank.OPTIONAL, instead_of=sequence.snapshot_plan.decode
        )
        if index.reserve_all([wanted]) == [None]:
            return None
        sequence.snapshot_plan.decode = block_hash
        self._slots.give_back([index.exchange(block_hash, state.slot)])
        found = Snapshot(state.position, block_hash, state.slot)
        sequence.snapshots.append(found)
        return found

    def check(self) -> None:
        """Assert that every slot is lent once, or free, and none is the index's (between steps)."""
        index = () if self._cache.states is None else self._cache.states.slots
        self._slots.check([state.slot for _, state in self._lent], index)

    def _certain(self, computed: Sequence[Chunk]) -> Chunks:
        """Who decodes then, in order of arrival; empty if anything else might happen, or if nobody does."""
        queues = self._queues
        if len(queues.paused) or len(queues.running) != len(computed) or not all(map(_has_simple_token, computed)):
            return ()
        going_on = [chunk for chunk in computed if _goes_on(chunk.request)]
        if self._may_admit(len(going_on)):
            return ()
        return tuple(Chunk(one.request, one.end, one.end + 1) for one in sorted(going_on, key=_ARRIVAL))

    def _may_admit(self, running: int) -> bool:
        """Whether somebody who waits might enter a step of so many others."""
        first = self._queues.waiting.first_awake
        if first is None or running >= self._limits.max_requests:
            return False
        if self._turned_away is None:
            return True
        request, available, matched = self._turned_away
        if request is not first:
            return True
        now_available, now_matched = self._chances(first)
        return now_available > available or now_matched > matched

    def _chances(self, request: Request) -> tuple[int, int]:
        """Blocks that it could have, and blocks that it would find; if neither grows it is turned away again."""
        return self._cache.available_count, len(self._cache.match(request.block_hashes))

    def _leaves_states(self, chunk: Chunk) -> bool:
        """Whether `chunk` ends a block whose states are to be kept; its block hash is not known yet."""
        sequence = chunk.request.sequence
        if self._cache.states is None or sequence.chain is None or sequence.cache_epoch != self._cache.epoch:
            return False
        return chunk.end % self._limits.block_size == 0

    def _missing(self, chunk: Chunk) -> int:
        return max(0, self._limits.blocks_for(chunk.end) - len(chunk.request.block_table))


def _has_simple_token(chunk: Chunk) -> bool:
    """Whether the chunk yields a token, and what is done to the logits behind that does not depend on it."""
    return chunk.yields_token and not chunk.drafts and not reads_tokens(chunk.request.params)


def _goes_on(request: Request) -> bool:
    """Whether another token follows the next one, unless that one ends it."""
    return request.generated_count + 1 < request.params.num_tokens_to_generate
