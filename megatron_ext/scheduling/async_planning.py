"""Asynchronous scheduling: plan the next step before the tokens of the current one are known (CU-6).

    step n        decodes, prefills that end in it, and prefills that go on after it
    step n + 1    each request that may go on decodes the token of step n, or computes the next chunk of its prompt

Step n + 1 is planned by `plan_step` like any other, on the requests as step n will leave them with a placeholder for
each token that it samples, and launched only if that plan does nothing but continue requests: none enters, none is
paused. A request whose token turns out to end it has a *discarded* row in step n + 1: the row is computed and its
result is dropped. Its writes are harmless: keys go after all that is published, states to its running state slot, and a
later step overwrites both when these blocks and slots are given out again.

Where anything else might happen in step n + 1, the step is not planned ahead but after step n is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import SnapshotRequest, StepPlan
from megatron_ext.scheduling.planner import plan_step
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.opportunistic_plan import passed_checkpoints, plan_opportunistic
from megatron_ext.scheduling.snapshots.snapshot_planner import plan_snapshots, reserve_snapshots
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.spec_decode.verification import DraftSlots
from megatron_ext.scheduling.step import reads_tokens

if TYPE_CHECKING:
    from megatron_ext.scheduling.scheduler import Scheduler

Position = tuple[Request, int]  # tokens of a request before a state


class AsyncPlanner:
    """Part of the scheduler that plans the next step while the current one is computed.

    Args:
        scheduler: The scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._grow = scheduler, scheduler.grow
        self._limits, self._queues, self._cache = scheduler.limits, scheduler.queues, scheduler.cache
        limits, states = scheduler.limits, scheduler.cache.states
        # The slot before is for padding rows.
        first = 0 if states is None else limits.first_apart_slot(states.total) + limits.draft_states + 1
        self._slots = DraftSlots(first, limits.async_states)
        self._planned: tuple[Chunk, ...] = ()
        self._lent: dict[Position, Snapshot] = {}

    @property
    def states(self) -> dict[int, tuple[Snapshot, ...]]:
        """Map request id to the snapshot slots of its states in the step planned ahead, for states to be kept."""
        found: dict[int, tuple[Snapshot, ...]] = {}
        for (request, _), state in self._lent.items():
            found[request.request_id] = (*found.get(request.request_id, ()), state)
        return found

    def plan_next(self, computed: Sequence[Chunk]) -> StepPlan | None:
        """Plan the step that follows the chunks `computed`, and allocate for it; None if it is not certain.

        Allocated blocks stay with their requests whatever becomes of the step. If no block is free, one is evicted, as
        planning the step would do; if the request ends before, the next request that needs a block finds that one free.
        Slots are reserved until the step is adopted or forgone.

        Args:
            computed: Chunks of living requests.
        """
        queues, loads = self._queues, self._scheduler.disk_loads
        if len(queues.paused) or loads.is_due or len(queues.running) != len(computed):
            return None
        yielding = [chunk.yields_token for chunk in computed]
        if not all(map(_is_simple, computed, yielding)) or self._wakes(computed):
            return None
        # Plan as if the tokens of `computed` had come: their number decides, whatever their ids will be.
        leaving = _assume(computed, yielding)
        try:
            plan = plan_step(
                queues,
                self._limits,
                self._cache,
                self._scheduler.pending_blocks,
                disk_loads=loads,
                leaving=leaving,
                holds_prefills=self._scheduler.holds_prefills,
            )
            positions = self._positions(plan)
        finally:
            _take_back(computed, yielding)
        if not plan.chunks or not plan.only_continues or len(positions) > len(self._slots):
            return None
        self._grow(plan.chunks)
        self._planned = plan.chunks
        slots = self._slots.take(len(positions))
        self._lent = {
            one: Snapshot(one[1], self._slots.name(), slot) for one, slot in zip(positions, slots, strict=True)
        }
        return plan

    def adopt(self) -> list[Snapshot]:
        """Account for the step planned ahead, which is the one computed now, as planning it would have done.

        Returns:
            Snapshots of the step in the slots that it writes, whose block hashes are known by now.
        """
        self._scheduler.prepare()
        self._scheduler.counters.launched_ahead += 1
        named = self._reserve([one for one in self._planned if not one.request.is_ended]) if self._lent else []
        self.forgo()  # states of requests that have ended, and those for which there is no slot
        return named

    def forgo(self) -> None:
        """Drop the step planned ahead."""
        self._slots.give([state.slot for state in self._lent.values()])
        self._lent, self._planned = {}, ()

    def _reserve(self, chunks: Sequence[Chunk]) -> list[Snapshot]:
        """Reserve the snapshots of the step under their block hashes, as if it were planned now.

        A slot that the index reserves becomes a slot for steps launched ahead, and the written slot becomes the
        index's, or its states are copied (see `StateIndex.exchange`).

        Returns:
            Snapshots in the slots that the step writes.
        """
        index, limits, cache, named = self._cache.states, self._limits, self._cache, list[Snapshot]()
        assert index is not None, "states of a model without recurrent layers"

        def place(one: SnapshotRequest, _: SlotId) -> SlotId:
            state = self._lent.pop((one.request, one.position))
            self._slots.give([index.exchange(one.block_hash, state.slot)])
            slot = index.reserved_slot(one.block_hash)
            if slot == state.slot:
                named.append(Snapshot(one.position, one.block_hash, slot))
            return slot

        wanted = plan_snapshots(chunks, (), (), limits, cache)
        wanted = (*wanted, *plan_opportunistic(chunks, (), wanted, limits, cache))
        reserve_snapshots(wanted, index, place)
        return named

    def check(self) -> None:
        """Assert between steps that each borrowed snapshot slot is reserved once or free and has no snapshot in it."""
        index = () if self._cache.states is None else self._cache.states.slots
        self._slots.check([state.slot for state in self._lent.values()], index)

    def _wakes(self, computed: Sequence[Chunk]) -> bool:
        """Return whether a waiting request is woken by what the current step publishes."""
        waiting, size = self._queues.waiting, self._limits.block_size
        return len(waiting) > 0 and any(
            waiting.wakes(chunk.request.request_id, chunk.end // size) for chunk in computed
        )

    def _positions(self, plan: StepPlan) -> list[Position]:
        """Return where states may have to be kept that have no slot yet; whether checkpoints get one is known later."""
        if self._cache.states is None:
            return []
        prefills = [chunk for chunk in plan.chunks if not chunk.is_decode]
        wanted = (*plan.snapshots, *passed_checkpoints(prefills, self._limits, self._cache))
        if not wanted:
            return []
        reserved = {(one.request, kept.position) for one in wanted for kept in one.request.snapshots}
        found = dict.fromkeys((one.request, one.position) for one in wanted)
        return [one for one in found if one not in reserved]


def _assume(computed: Sequence[Chunk], yielding: Sequence[bool]) -> set[Request]:
    """Let requests be as a step will leave them, with token 0 in place of each one that it samples.

    Returns the requests that end then, because they have all their tokens.
    """
    leaving = set()
    for chunk, yields_token in zip(computed, yielding, strict=True):
        request = chunk.request
        request.computed_end = chunk.end
        if yields_token:
            request.tokens.append(0)
        has_all = request.generated_count >= request.max_generated
        if has_all and chunk.end >= request.prompt_length:
            leaving.add(request)
    return leaving


def _take_back(computed: Sequence[Chunk], yielding: Sequence[bool]) -> None:
    """Let requests be as they were before `_assume`."""
    for chunk, yields_token in zip(computed, yielding, strict=True):
        request = chunk.request
        request.computed_end = chunk.start
        if yields_token:
            request.tokens.pop()
            if request.chain is not None:  # the block of the placeholder may have been hashed
                request.chain.cut(len(request.tokens))


def _is_simple(chunk: Chunk, yields_token: bool) -> bool:
    """Return whether the request's next chunk follows from the plan alone.

    Not if the logits processors of the next token read the chunk's token, if the next chunk scores prompt tokens, if
    the token mask of a structured output is not known, or if an audit compares the chunk's entries.
    """
    request = chunk.request
    if chunk.drafts or request.audit is not None:
        return False
    if yields_token:
        return not reads_tokens(request.params)
    return not request.params.wants_prompt_log_probs and not request.lacks_mask
