"""Asynchronous scheduling: plan the next step before the tokens of the current one are known (CU-6).

    step n        decodes, and prefills that end: every chunk yields a token
    step n + 1    requests that may go on: each decodes the token of step n, and nothing else is scheduled

A request whose token turns out to end it has a *discarded* row in step n + 1: the row is computed and its result is
dropped. Its writes are harmless: keys go after all that is published, states to its running state slot, and a later
step overwrites both when these blocks and slots are given out again.

Where anything else might happen in step n + 1, the step is not planned ahead but after step n is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.scheduling.block_hasher import BlockHasher
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.disk_loads import DiskLoads
from megatron_ext.scheduling.logits_options import reads_tokens
from megatron_ext.scheduling.plan import SchedulerLimits, SnapshotRequest, StepPlan
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.spec_decode.draft_slots import DraftSlots

_ARRIVAL = attrgetter("request.arrival")
Chunks = tuple[Chunk, ...]


def plan_of(chunks: Chunks) -> StepPlan:
    """Return a plan that decodes `chunks` and changes nothing else."""
    return StepPlan(
        preemptions=(), pauses=(), resumes=(), failures=(), admissions=(), chunks=chunks, snapshots=(), deferrals=()
    )


class AsyncPlanner:
    """Part of the scheduler that plans the next step while the current one is computed.

    Args:
        limits: Scheduler limits of the engine.
        queues: Queues of the scheduler.
        cache: Prefix cache of the scheduler; provides free blocks.
        hashing: Block hasher of the scheduler; goes on in steps that are planned ahead, too.
        counters: Counters of the scheduler; steps launched ahead are counted there.
        disk_loads: Loads from disk that waiting requests wait for.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: Queues,
        cache: PrefixCache,
        hashing: BlockHasher,
        counters: Counters,
        disk_loads: DiskLoads,
    ) -> None:
        self._limits = limits
        self._queues = queues
        self._cache = cache
        self._hashing = hashing
        self._counters = counters
        self._disk_loads = disk_loads
        self._turned_away: tuple[Request, int, int] | None = None  # for lack of blocks; see `_chances`
        first = (
            0 if cache.states is None else limits.first_apart_slot(cache.states.total) + limits.draft_states + 1
        )  # the slot before is that of padding rows
        self._slots = DraftSlots(first, limits.async_states)
        self._lent: list[tuple[Request, Snapshot]] = []

    @property
    def states(self) -> dict[int, Snapshot]:
        """Map request id to the snapshot slot of its states in the step planned ahead, for states to be kept."""
        return {request.request_id: state for request, state in self._lent}

    def note(self, plan: StepPlan) -> None:
        """Note which request a planned and applied step could not admit for lack of blocks."""
        first = plan.deferral
        is_stuck = first is not None and first.resource == "blocks"
        self._turned_away = (first.request, *self._chances(first.request)) if first is not None and is_stuck else None

    def plan_next(self, computed: Sequence[Chunk]) -> Chunks:
        """Plan the step after the one that computes `computed`, and allocate for it; empty if it is not certain.

        Allocated blocks stay with their requests whatever becomes of the step. If no block is free, one is evicted, as
        planning the step would do; if the request ends before, the next request that needs a block finds that one free.
        Slots are reserved until the step is adopted or forgone.

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
        """Account for the step planned ahead, which is the one computed now, as planning it would have done.

        Returns:
            Snapshots of the step in the slots that it writes, whose block hashes are known by now.
        """
        self._hashing.go_on()
        self._counters.launched_ahead += 1
        lent, self._lent = self._lent, []
        named: list[Snapshot] = []
        for request, state in lent:
            found = self._named(request, state)
            if found is None:
                self._slots.give_back([state.slot])
            elif found.slot == state.slot:
                named.append(found)
        return named

    def forgo(self) -> None:
        """Drop the step planned ahead."""
        self._slots.give_back(state.slot for _, state in self._lent)
        self._lent.clear()

    def _named(self, request: Request, state: Snapshot) -> Snapshot | None:
        """Return the snapshot under its block hash, reserved as if its step were planned now; None if it gets no slot.

        The slot that the index reserves becomes a slot for steps launched ahead, and the one that is written becomes
        the index's, or its states are copied (see `StateIndex.exchange`).
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
        found = Snapshot(state.position, block_hash, index.reserved_slot(block_hash))
        sequence.snapshots.append(found)
        return found

    def check(self) -> None:
        """Assert between steps that each borrowed snapshot slot is reserved once or free and has no snapshot in it."""
        index = () if self._cache.states is None else self._cache.states.slots
        self._slots.check([state.slot for _, state in self._lent], index)

    def _certain(self, computed: Sequence[Chunk]) -> Chunks:
        """Return chunks that decode in the next step, in order of arrival; empty if anything else might happen."""
        queues = self._queues
        if len(queues.paused) or len(queues.running) != len(computed) or not all(map(_has_simple_token, computed)):
            return ()
        continuing = [chunk for chunk in computed if _continues(chunk.request)]
        if self._may_admit(len(continuing)):
            return ()
        return tuple(Chunk(one.request, one.end, one.end + 1) for one in sorted(continuing, key=_ARRIVAL))

    def _may_admit(self, running: int) -> bool:
        """Return whether a waiting request might enter a step that has `running` requests."""
        if self._disk_loads.is_due:
            return True
        first = self._first_awake()
        if first is None or running >= self._limits.max_requests:
            return False
        if self._turned_away is None:
            return True
        request, available, matched = self._turned_away
        if request is not first:
            return True
        now_available, now_matched = self._chances(first)
        return now_available > available or now_matched > matched

    def _first_awake(self) -> Request | None:
        """Return the first awake request that waits for no load from disk."""
        loads, waiting = self._disk_loads, self._queues.waiting
        if not loads:
            return waiting.first_awake
        found = (
            one for one in waiting.line() if loads.awaited_by(one, len(self._cache.match(one.block_hashes))) is None
        )
        return next(found, None)

    def _chances(self, request: Request) -> tuple[int, int]:
        """Return the blocks it may take and those that would match; while neither grows, the request stays deferred."""
        available = self._cache.available_count - self._cache.kept_for_snapshots
        return available, len(self._cache.match(request.block_hashes))

    def _leaves_states(self, chunk: Chunk) -> bool:
        """Return whether `chunk` ends a block whose states are to be kept; its block hash is not known yet."""
        sequence = chunk.request.sequence
        if self._cache.states is None or sequence.chain is None or sequence.cache_epoch != self._cache.epoch:
            return False
        return chunk.end % self._limits.block_size == 0

    def _missing(self, chunk: Chunk) -> int:
        return max(0, self._limits.blocks_for(chunk.end) - len(chunk.request.block_table))


def _has_simple_token(chunk: Chunk) -> bool:
    """Return whether the chunk yields a token that the logits processors of the next token do not read."""
    return chunk.yields_token and not chunk.drafts and not reads_tokens(chunk.request.params)


def _continues(request: Request) -> bool:
    """Return whether the request continues after its next token, unless that token itself ends it."""
    return request.generated_count + 1 < request.params.num_tokens_to_generate
