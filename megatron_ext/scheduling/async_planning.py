"""Asynchronous scheduling: plan the next step before the tokens of the current one are known (CU-6).

    step n        decodes, prefills that end in it, and prefills that go on after it
    step n + 1    each request that may go on decodes the token of step n, or computes the next chunk of its prompt

Nothing else is scheduled in step n + 1: no request enters, none is paused. A request whose token turns out to end it
has a *discarded* row in step n + 1: the row is computed and its result is dropped. Its writes are harmless: keys go
after all that is published, states to its running state slot, and a later step overwrites both when these blocks and
slots are given out again.

Where anything else might happen in step n + 1, the step is not planned ahead but after step n is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.scheduling.block_hasher import BlockHasher
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.disk_loads import DiskLoads
from megatron_ext.scheduling.logits_options import reads_tokens
from megatron_ext.scheduling.plan import SchedulerLimits, SnapshotRequest, StepPlan
from megatron_ext.scheduling.prefill_chunks import plan_continuations
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.opportunistic_plan import passed_checkpoints, plan_opportunistic
from megatron_ext.scheduling.snapshots.reservation import reserve_snapshots
from megatron_ext.scheduling.snapshots.snapshot_planner import plan_snapshots
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.spec_decode.draft_slots import DraftSlots

_ARRIVAL = attrgetter("request.arrival")
Chunks = tuple[Chunk, ...]
Position = tuple[Request, int]  # tokens of a request before a state


def plan_of(chunks: Chunks) -> StepPlan:
    """Return a plan that decodes `chunks` and changes nothing else."""
    return StepPlan(
        preemptions=(), pauses=(), resumes=(), failures=(), admissions=(), chunks=chunks, snapshots=(), deferrals=()
    )


@dataclass(frozen=True)
class NextChunks:
    """Chunks of the next step.

    Attributes:
        decodes: Chunks that decode, in order of arrival; `continued` may have more.
        continued: Next chunks of prefills, in the order in which they began.
    """

    decodes: Chunks = ()
    continued: Chunks = ()

    @property
    def packed(self) -> Chunks:
        """Chunks in the order of the step: a chunk of one generated token is a decode to the layers."""
        return tuple(sorted((*self.decodes, *self.continued), key=lambda chunk: not chunk.is_decode))

    def living(self) -> NextChunks:
        """Return the chunks of requests that have not ended."""
        decodes, continued = (
            tuple([one for one in chunks if not one.request.is_ended]) for chunks in (self.decodes, self.continued)
        )
        return NextChunks(decodes, continued)


_NOTHING = NextChunks()


@dataclass(frozen=True)
class _TurnedAway:
    """Request that the last plan could not admit, with what it found then.

    Attributes:
        request: First request in the queue that had to wait for room.
        available: Blocks that it could take; None if it was not blocks that it lacked.
        matched: Blocks that it matched.
    """

    request: Request
    available: int | None
    matched: int


class AsyncPlanner:
    """Part of the scheduler that plans the next step while the current one is computed.

    Args:
        limits: Scheduler limits of the engine.
        queues: Queues of the scheduler.
        cache: Prefix cache of the scheduler; provides free blocks.
        pending_blocks: Blocks that prefills are about to publish.
        hashing: Block hasher of the scheduler; goes on in steps that are planned ahead, too.
        counters: Counters of the scheduler; steps launched ahead are counted there.
        disk_loads: Loads from disk that waiting requests wait for.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: Queues,
        cache: PrefixCache,
        pending_blocks: PendingBlocks,
        hashing: BlockHasher,
        counters: Counters,
        disk_loads: DiskLoads,
    ) -> None:
        self._limits = limits
        self._queues = queues
        self._cache = cache
        self._pending_blocks = pending_blocks
        self._hashing = hashing
        self._counters = counters
        self._disk_loads = disk_loads
        self._turned_away: _TurnedAway | None = None
        first = (
            0 if cache.states is None else limits.first_apart_slot(cache.states.total) + limits.draft_states + 1
        )  # the slot before is that of padding rows
        self._slots = DraftSlots(first, limits.async_states)
        self._planned = _NOTHING
        self._lent: dict[Position, Snapshot] = {}

    @property
    def states(self) -> dict[int, tuple[Snapshot, ...]]:
        """Map request id to the snapshot slots of its states in the step planned ahead, for states to be kept."""
        found: dict[int, tuple[Snapshot, ...]] = {}
        for (request, _), state in self._lent.items():
            found[request.request_id] = (*found.get(request.request_id, ()), state)
        return found

    def note(self, plan: StepPlan) -> None:
        """Note which request a planned and applied step could not admit for lack of room."""
        first = plan.deferral
        self._turned_away = None
        if first is not None:
            available, matched = self._chances(first.request)
            self._turned_away = _TurnedAway(first.request, available if first.resource == "blocks" else None, matched)

    def plan_next(self, computed: Sequence[Chunk]) -> Chunks:
        """Plan the step after the one that computes `computed`, and allocate for it; empty if it is not certain.

        Allocated blocks stay with their requests whatever becomes of the step. If no block is free, one is evicted, as
        planning the step would do; if the request ends before, the next request that needs a block finds that one free.
        Slots are reserved until the step is adopted or forgone.

        Args:
            computed: Chunks of living requests.
        """
        planned = self._certain(computed)
        chunks = planned.packed
        missing = [self._missing(chunk) for chunk in chunks]
        positions = self._positions(planned)
        if sum(missing) > self._cache.available_count or len(positions) > self._slots.free_count:
            return ()
        for chunk, count in zip(chunks, missing, strict=True):
            if count:
                chunk.request.sequence.block_table += tuple(self._cache.allocate(count))
        self._planned = planned
        self._lent = {one: Snapshot(one[1], self._slots.name(), self._slots.take()) for one in positions}
        return chunks

    def adopt(self) -> list[Snapshot]:
        """Account for the step planned ahead, which is the one computed now, as planning it would have done.

        Returns:
            Snapshots of the step in the slots that it writes, whose block hashes are known by now.
        """
        self._hashing.go_on()
        self._counters.launched_ahead += 1
        planned, self._planned = self._planned.living(), _NOTHING
        named = self._reserve(planned) if self._lent else []
        self.forgo()  # states of requests that have ended, and those for which there is no slot
        return named

    def forgo(self) -> None:
        """Drop the step planned ahead."""
        self._slots.give_back(state.slot for state in self._lent.values())
        self._lent, self._planned = {}, _NOTHING

    def _reserve(self, planned: NextChunks) -> list[Snapshot]:
        """Reserve the snapshots of the step under their block hashes, as if it were planned now.

        A slot that the index reserves becomes a slot for steps launched ahead, and the one that is written becomes the
        index's, or its states are copied (see `StateIndex.exchange`).

        Returns:
            Snapshots in the slots that the step writes.
        """
        index, limits, cache, named = self._cache.states, self._limits, self._cache, list[Snapshot]()
        assert index is not None, "states of a model without recurrent layers"

        def place(one: SnapshotRequest, _: SlotId) -> SlotId:
            state = self._lent.pop((one.request, one.position))
            self._slots.give_back([index.exchange(one.block_hash, state.slot)])
            slot = index.reserved_slot(one.block_hash)
            if slot == state.slot:
                named.append(Snapshot(one.position, one.block_hash, slot))
            return slot

        wanted = plan_snapshots(planned.packed, (), (), limits, cache)
        wanted = (*wanted, *plan_opportunistic(planned.continued, (), wanted, limits, cache))
        reserve_snapshots(wanted, index, place)
        self._queues.follow_moves({} if cache.border is None else cache.border.take_moves())
        return named

    def check(self) -> None:
        """Assert between steps that each borrowed snapshot slot is reserved once or free and has no snapshot in it."""
        index = () if self._cache.states is None else self._cache.states.slots
        self._slots.check([state.slot for state in self._lent.values()], index)

    # What is certain

    def _certain(self, computed: Sequence[Chunk]) -> NextChunks:
        """Return the chunks of the next step; empty if anything else might happen in it."""
        queues, limits = self._queues, self._limits
        if len(queues.paused) or len(queues.running) != len(computed) or not all(map(_is_simple, computed)):
            return _NOTHING
        decodes: list[Chunk] = []
        begun: list[tuple[Request, int]] = []
        for chunk in sorted(computed, key=_ARRIVAL):
            request, known = chunk.request, len(chunk.request.sequence.tokens)
            if chunk.yields_token:
                if _continues(request):
                    decodes.append(Chunk(request, chunk.end, chunk.end + 1))
            elif request.prompt_length <= chunk.end == known - 1:  # generated before it was preempted
                decodes.append(Chunk(request, chunk.end, known))
            elif chunk.end < known:
                begun.append((request, chunk.end))
        continued = plan_continuations(begun, limits, limits.max_tokens - len(decodes))
        planned = NextChunks(tuple(decodes), tuple(continued))
        if self._wakes(computed) or self._may_fork(continued) or self._may_admit(planned, len(decodes) + len(begun)):
            return _NOTHING
        return planned

    def _wakes(self, computed: Sequence[Chunk]) -> bool:
        """Return whether a waiting request is woken by what the current step publishes."""
        waiting, size = self._queues.waiting, self._limits.block_size
        return any(waiting.wakes(chunk.request.request_id, chunk.end // size) for chunk in computed)

    def _may_fork(self, continued: Sequence[Chunk]) -> bool:
        """Return whether a chunk ends a prompt that sleeping samples of its group may take over."""
        followers_of = self._queues.waiting.followers_of
        return any(
            one.group is not None and one.group == chunk.request.group
            for chunk in continued
            if chunk.end == chunk.request.prompt_length
            for one in followers_of(chunk.request.request_id)
        )

    def _may_admit(self, planned: NextChunks, running: int) -> bool:
        """Return whether a waiting request might enter a step that has `running` requests, or follow one of them."""
        if self._disk_loads.is_due:
            return True
        first = self._first_awake()
        if first is None:
            return False
        before, (available, matched) = self._turned_away, self._chances(first)
        is_same = before is not None and before.request is first and matched <= before.matched
        if planned.continued and not (is_same and not self._has_leader(first, matched)):
            return True
        if running >= self._limits.max_requests or not self._has_room(planned):
            return False
        return before is None or not is_same or before.available is None or available > before.available

    def _has_room(self, planned: NextChunks) -> bool:
        """Return whether another prefill could begin in the step, as far as its tokens and prefills are concerned."""
        tokens = sum(chunk.length for chunk in planned.continued)
        has_tokens = len(planned.decodes) + tokens < self._limits.max_tokens
        return has_tokens and self._limits.may_prefill(len(planned.continued), tokens)

    def _has_leader(self, request: Request, matched: int) -> bool:
        """Return whether a running request computes the next block that `request` lacks."""
        following = request.block_hashes[matched : matched + 1]
        return any(self._pending_blocks.leader(one) is not None for one in following)

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

    # What it needs

    def _positions(self, planned: NextChunks) -> list[Position]:
        """Return where states may have to be kept that have no slot yet: plans drop some, and know the hashes."""
        if self._cache.states is None:
            return []
        prefills = [chunk for chunk in planned.packed if not chunk.is_decode]
        wanted = [
            *plan_snapshots(prefills, (), (), self._limits, self._cache),
            *passed_checkpoints(planned.continued, self._limits, self._cache),
        ]
        found = [
            *((one.request, one.position) for one in wanted),
            *((chunk.request, chunk.end) for chunk in planned.packed if self._leaves_states(chunk)),
        ]
        reserved = {(request, one.position) for request, _ in found for one in request.sequence.snapshots}
        return [one for one in dict.fromkeys(found) if one not in reserved]

    def _leaves_states(self, chunk: Chunk) -> bool:
        """Return whether a decode ends a block whose states are to be kept; its block hash may not be known yet."""
        sequence = chunk.request.sequence
        if not chunk.is_decode or sequence.chain is None or sequence.cache_epoch != self._cache.epoch:
            return False
        return chunk.end % self._limits.block_size == 0

    def _missing(self, chunk: Chunk) -> int:
        return max(0, self._limits.blocks_for(chunk.end) - len(chunk.request.block_table))


def _is_simple(chunk: Chunk) -> bool:
    """Return whether the request's next chunk follows from the plan alone.

    Not if the logits processors of the next token read the one that the chunk yields, if the next chunk scores prompt
    tokens, if the token mask of a structured output is not known, or if an audit compares what the chunk computes.
    """
    request = chunk.request
    if chunk.drafts or request.audit is not None:
        return False
    if chunk.yields_token:
        return not reads_tokens(request.params)
    return not request.params.wants_prompt_log_probs and not request.lacks_mask


def _continues(request: Request) -> bool:
    """Return whether the request continues after its next token, unless that token itself ends it."""
    return request.generated_count + 1 < request.params.num_tokens_to_generate
