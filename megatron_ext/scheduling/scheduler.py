"""Scheduler: applies plans and owns queues, blocks, cache and running state slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash, HashChain, root_hash
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.prefix_cache.state_index import StateIndex
from megatron_ext.scheduling.accounting import general_reason
from megatron_ext.scheduling.async_planning import AsyncPlanner
from megatron_ext.scheduling.audit import compare_with_cache
from megatron_ext.scheduling.block_hasher import BlockHasher
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.counters import Counters, count_hit, count_lost, note_use
from megatron_ext.scheduling.disk_loads import DiskLoads
from megatron_ext.scheduling.explain_admission import explain_admission
from megatron_ext.scheduling.forks import share_published
from megatron_ext.scheduling.kept_data import lacking_data
from megatron_ext.scheduling.plan import Admission, SchedulerLimits, SnapshotRequest, StepPlan
from megatron_ext.scheduling.planner import plan_step, reads_cache
from megatron_ext.scheduling.prefix_ranking import PrefixRanking
from megatron_ext.scheduling.prefix_wait.prefix_leaders import (
    PendingBlocks,
    check_sleepers,
    note_followers,
    put_to_sleep,
)
from megatron_ext.scheduling.publication import publish_blocks
from megatron_ext.scheduling.queue import Queues, check_ownership
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Masks, Request
from megatron_ext.scheduling.request_events import EventType
from megatron_ext.scheduling.running_slots import RunningSlots
from megatron_ext.scheduling.snapshots.snapshot_planner import reserve_snapshots
from megatron_ext.scheduling.spec_decode.drafts import Drafts
from megatron_ext.scheduling.spec_decode.verification import NO_TOKENS, TokensById
from megatron_ext.scheduling.step import ScheduledStep, describe_step
from megatron_ext.scheduling.waiting_order import WaitingOrder


class Scheduler:
    """Scheduler of one engine; each step is `schedule`, then `commit` or `abandon`.

    Between the two calls no other code may modify the step's requests.

    Args:
        limits: Limits that the engine was built for.
        policy: Eviction policy of unused cached blocks; None disables caching.
        fingerprint: Everything that KV and states of equal tokens depend on, except the weights' version.
        slots: Snapshot slots for recurrent states, possibly 0; None if the model has no such states, or `limits.slabs`
            has them.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: EvictionPolicyName | None = None,
        fingerprint: bytes = b"",
        slots: int | None = None,
    ) -> None:
        self.limits = limits
        self.cache = PrefixCache(
            limits.total_blocks, policy, slots, keeps_tokens=limits.keeps_tokens, slabs=limits.slabs
        )
        self.queues = Queues(self.cache, WaitingOrder(limits.overtake_tokens))
        if self.cache.shared_memory is not None:
            self.cache.shared_memory.arena.blocks.tables.append(self.queues.follow_moves)
        self.pending_blocks = PendingBlocks()
        self.running_slots = RunningSlots(limits.max_requests)
        self.counters = Counters()
        self.drafts = Drafts(limits, self.cache, self.counters)
        self.disk_loads = DiskLoads(limits, self.cache, self.queues)
        self.holds_prefills = False
        self._hashing = BlockHasher()
        self.ranking = PrefixRanking(limits, self.queues, self.cache, self._hashing)
        self._fingerprint, self._weights_version = fingerprint, 0
        # Called with each admission once its matched blocks are pinned, before anything is allocated for it.
        self.admission_observers: list[Callable[[Admission], None]] = []
        if limits.explains:
            self.admission_observers.append(partial(explain_admission, cache=self.cache, block_size=limits.block_size))
        self.async_planner = AsyncPlanner(self)

    @property
    def _states(self) -> StateIndex:
        assert self.cache.states is not None, "snapshots of a model without recurrent layers"
        return self.cache.states

    def add(self, request: Request) -> None:
        """Add an admissible request to the waiting queue; it ends by length when it fills the pool."""
        request.end_within(self.limits.pool_tokens)
        self._start_chain(request)
        keeps, is_caching = request.kept.keeps_log_probs, self.cache.is_enabled
        reason = general_reason(request.params, is_caching=is_caching, keeps_log_probs=keeps)
        request.ledger.general_reason = reason
        request.ledger.retokenized = request.inputs.retokenized or (0, 0)
        self._hashing.begin(request)
        self.queues.waiting.add(request)
        self.ranking.rank([request])

    def _start_chain(self, request: Request) -> None:
        """Give a request the root of its block hashes, unless it has it already or does not use the cache."""
        if self.cache.is_enabled and request.params.enable_prefix_caching:
            root = self.root_of(request.params.cache_salt)
            if request.chain is None or request.chain.root != root:
                request.chain = HashChain(root, self.limits.block_size)
            keeps_log_probs = self.limits.keeps_log_probs and request.params.wants_prompt_log_probs
            kinds = {DataKind.LOG_PROBS: keeps_log_probs, DataKind.ROUTING: self.limits.keeps_routing}
            request.kept.kinds = tuple(kind for kind, is_kept in kinds.items() if is_kept)

    def root_of(self, salt: str | None) -> BlockHash:
        """Return the root of the block hashes of sequences with a salt: all that they depend on except the tokens."""
        numbers = self._weights_version, self.limits.block_size
        fields = [self._fingerprint, *(number.to_bytes(8, "little") for number in numbers)]
        if salt is not None:
            fields.append(salt.encode("utf-8", "surrogatepass"))  # JSON may contain lone surrogates
        return root_hash(fields)

    def waits_for_disk(self, request: Request) -> bool:
        """Return whether a waiting request waits for entries on disk."""
        return self.disk_loads.awaited_by(request, len(self.cache.match(request.block_hashes))) is not None

    def propose(self, drafts: TokensById) -> None:
        """Set the drafts that the next step verifies, by request id, as far as there is room; used once."""
        self.drafts.proposals = drafts

    def allow(self, request: Request, masks: Masks) -> None:
        """Set the token masks of a structured output; a request without them is left out of steps (SE-10)."""
        request.masks = masks

    def hold_prefills(self, *, are_held: bool) -> None:
        """Let requests that decode have the next steps to themselves, or no more; without them nothing is held."""
        self.holds_prefills = are_held

    def schedule(self) -> StepPlan:
        """Plan the next step and apply the plan; the caller computes the plan's chunks."""
        self.prepare()
        plan = plan_step(
            self.queues,
            self.limits,
            self.cache,
            self.pending_blocks,
            self.drafts.proposals,
            self.disk_loads,
            free_draft_states=len(self.drafts.slots),
            holds_prefills=self.holds_prefills,
        )
        self.cache.note_changes_applied()
        for admission in plan.admissions:  # before any allocation, so that no matched block is evicted
            self.cache.pin(admission.matched)
            note_use(admission, self.cache, self.limits, self.counters)
            for observe in self.admission_observers:
                observe(admission)
        for request in plan.preemptions:
            self._requeue(request, EventType.EVICT)
            self.counters.preemptions += 1
        for request in plan.pauses:
            self.queues.move(request, self.queues.paused)
            request.timeline.note(EventType.PAUSE)
            self.counters.pauses += 1
        for request in plan.resumes:
            self.queues.move(request, self.queues.running)
        self.grow(plan.chunks)
        if (budgets := self.queues.waiting.order.budgets) is not None:
            exempt = [deferral.request for deferral in plan.deferrals if not deferral.lacks_room]
            works = [(admission.request, admission.work) for admission in plan.admissions]
            self.counters.overtakes += budgets.charge(works, exempt)
        for admission in plan.admissions:
            self._admit(admission)
        note_followers(plan.deferrals, self.counters)
        self.disk_loads.note(plan.deferrals)
        self._reserve_snapshots(plan.snapshots)
        self.drafts.reserve(plan.chunks)
        put_to_sleep(plan.deferrals, self.queues, self.limits.block_size, self.cache, self.pending_blocks)
        return plan

    def prepare(self) -> None:
        """Hash and rank waiting requests before each plan, which depends on it."""
        self._hashing.hash_slice()
        self.ranking.refresh()

    def describe(self, plan: StepPlan) -> ScheduledStep:
        """Return the message of a plan with chunks, which has been applied; it tells all changes of the memory."""
        size, cache = self.limits.block_size, self.cache
        comparison = compare_with_cache(plan.chunks, cache, size) if self.limits.audit_interval else None
        step = describe_step(plan.chunks, size, cache.changes, comparison)
        self.cache.note_changes_sent()
        return step

    def grow(self, chunks: Iterable[Chunk]) -> None:
        """Allocate blocks for chunks that outgrow their requests' blocks; admissions allocate all blocks at once."""
        for chunk in chunks:
            request = chunk.request
            missing = self.limits.missing_blocks(request, chunk.end) if request.block_table else 0
            if missing:
                request.block_table += tuple(self.cache.allocate(missing))

    def _admit(self, admission: Admission) -> None:
        request, matched = admission.request, admission.matched
        if (source := admission.chunk.source) is not None:  # a fork shares blocks that may not be published yet
            matched = source.request.block_table[: admission.usable_blocks]
            self.cache.pool.retain(matched)
        if request.ledger.matched_blocks is None and reads_cache(request):  # at its first admission only
            count_lost(admission, self.cache, self.limits, self.counters)
        request.block_table = (*matched, *self.cache.allocate(admission.new_blocks))
        request.running_slot = self.running_slots.take()
        request.computed_end = admission.chunk.start
        request.restore, request.snapshot_plan.opportunistic = admission.restore, admission.opportunistic
        request.shared_end = len(matched) * self.limits.block_size
        request.published_blocks = len(matched)
        request.cache_epoch = self.cache.epoch  # after a reset it publishes nothing
        # Blocks without all data that the request needs are shared, but their tokens are computed again.
        start, size = admission.chunk.start, self.limits.block_size
        usable = request.kept.blocks = admission.usable_blocks
        request.kept.resume_position, request.kept.known_end = start, usable * size
        lacking = None if source is not None else lacking_data(request, len(matched), self.cache)
        self.counters.skipped_tokens += request.ledger.admit(start, len(matched), size, usable, lacking)
        # From now on others may wait for the blocks that it computes.
        self.pending_blocks.add(request.request_id, request.block_hashes[len(matched) :])
        count_hit(admission, self.cache, self.limits, self.counters)
        self.counters.blocks_matched += len(matched)
        self.queues.move(request, self.queues.running)
        request.timeline.note(EventType.ADD_CONTEXT)

    def _reserve_snapshots(self, wanted: Sequence[SnapshotRequest]) -> None:
        """Reserve slots for the snapshots of the step's plan, all at once; snapshots without a slot are left out."""
        if wanted:
            reserve_snapshots(wanted, self._states)

    def commit(
        self, step: ScheduledStep, sampled: Mapping[int, int], target_tokens: TokensById = NO_TOKENS
    ) -> list[Request]:
        """Apply the result of a successful step. This is the one transition at its end, and it cannot fail.

        Computed intervals and ledgers grow, complete blocks and reached snapshots are published, new tokens are
        appended, and requests end whose last token came, by id or by count. Texts are made later.

        Args:
            step: Message of the step that was computed.
            sampled: Request id -> new token, for exactly those chunks that yield one.
            target_tokens: Request id -> target tokens after its drafts, if it has drafts (see `accepted_tokens`).

        Returns:
            Requests that have ended.
        """
        running = {request.request_id: request for request in self.queues.running}
        requests = [running[chunk.request_id] for chunk in step.chunks]
        yielding = {one.request_id for one in step.yielding}
        assert yielding == sampled.keys(), f"tokens of {sorted(sampled)} for chunks of {sorted(yielding)}"
        for request, chunk in zip(requests, step.chunks, strict=True):
            assert chunk.start == request.computed_end, f"request {chunk.request_id} has another position"
        # First the drafts, which say where each chunk ends; then all that is computed is published, so that a request
        # which ends below leaves its blocks to others.
        ends, new = self.drafts.accept(requests, step.chunks, sampled, target_tokens)
        self._advance(requests, ends)
        for fork in step.forks:
            assert fork.source is not None, "it takes over a prompt"
            share_published(running[fork.request_id], running[fork.source.request_id], self.cache)
        return self._extend(requests, new)

    def _advance(self, requests: Sequence[Request], ends: Sequence[int]) -> None:
        """Mark the requests' tokens up to `ends` as computed, and publish complete blocks."""
        unsettled = self.drafts.unsettled
        for request, end in zip(requests, ends, strict=True):
            computed = request.advance(end)
            if request.audit is None:
                self.counters.prefill_tokens += computed
            publish_blocks(request, self.limits.block_size, self.cache, self.pending_blocks, self.queues.waiting)
            self._show_snapshots(request)
            if unsettled and request.request_id in unsettled:
                self.queues.waiting.published(self.drafts.commit(request))

    def _extend(self, requests: Sequence[Request], sampled: Mapping[int, int]) -> list[Request]:
        """Append each request's new token, after all that the step computed is published; return requests that end.

        A request without a new token ends only if it generates none.
        """
        ended = []
        for request in requests:
            if request.request_id in sampled:
                request.append(sampled[request.request_id])
            elif request.params.num_tokens_to_generate:
                continue
            if (reason := request.reason_to_end) is not None:
                self._end(request, Outcome(Status.COMPLETED, reason))
                ended.append(request)
        return ended

    def _show_snapshots(self, request: Request) -> None:
        """Publish the snapshots at the positions that the request has now reached."""
        if not request.snapshots:
            return
        for snapshot in request.snapshots:
            if snapshot.position <= request.computed_end:
                self._states.commit(snapshot.block_hash)
                self.queues.waiting.published([snapshot.block_hash])
        request.snapshots = [one for one in request.snapshots if one.position > request.computed_end]

    def abandon(self, chunks: Iterable[Chunk], reason: str) -> None:
        """Requeue the requests of a failed forward, whose pool contents are undefined, to start again.

        If the step was to move contents of other requests, too, these start again, and nothing stays cached.
        """
        for chunk in chunks:
            self._requeue(chunk.request, EventType.ERROR_TRANSIENT, reason)
        if self.cache.are_copies_pending:
            self.suspend()

    def end(self, request: Request, outcome: Outcome) -> None:
        """End a request outside of a step; its blocks and slots are free at once."""
        self._end(request, outcome)

    def _end(self, request: Request, outcome: Outcome) -> None:
        self._release(request)
        self.queues.discard(request)
        request.end(outcome)

    def suspend(self) -> None:
        """Requeue all requests with their tokens before the pools lose their contents."""
        for request in self.queues.holding():
            self._requeue(request)
        self._reset_cache()

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache: no earlier block is matched again, and requests in flight publish nothing (EX-4)."""
        self._reset_cache()

    def _reset_cache(self) -> None:
        self.disk_loads.clear()
        self.cache.reset()
        for request in self.queues:
            request.snapshots, request.snapshot_plan.end_on_disk = [], 0
        for request_id in self.pending_blocks.requests():
            self.pending_blocks.discard(request_id)
        self.queues.waiting.forget()

    def drop_kept_data(self, block_hashes: Sequence[BlockHash]) -> None:
        """Drop the data kept with blocks, since log-probs or routing rows that were noted have not been written."""
        self.cache.kept.drop(block_hashes)

    def quarantine(self, block_hash: BlockHash, *, states_only: bool) -> int:
        """Drop a wrong entry and all computed from it; requests that use it start again. Return the blocks dropped.

        Args:
            block_hash: Hash of the block whose keys and values, or states at the end, are wrong.
            states_only: Whether the block's keys and values are sound, and only its snapshot is wrong.
        """
        blocks = self.cache.continuations(block_hash, itself=not states_only)
        dropped = set(blocks)
        for request in self.queues.holding():
            is_from_states = block_hash in request.snapshot_plan.used
            if is_from_states or not dropped.isdisjoint(request.block_table):
                self._requeue(request, EventType.EVICT)
                self.counters.preemptions += 1
        self.disk_loads.clear()
        if states_only:
            self._states.drop(block_hash)
        count = self.cache.drop_all(blocks)
        if self.cache.lower_tier is not None:  # last, since it may fail
            self.cache.lower_tier.quarantine(block_hash, self.cache.index, states_only=states_only)
        return count

    def weights_changed(self, *, restarts: bool) -> None:
        """Reset the cache and use new roots of block hashes; requests in the batch start again if `restarts`."""
        self._weights_version += 1
        for request in self.queues.holding() if restarts else ():
            self._requeue(request, EventType.EVICT)
        self._reset_cache()
        for request in self.queues.waiting:
            self._start_chain(request)
            self._hashing.resume(request)

    def _requeue(self, request: Request, event: EventType | None = None, payload: str | None = None) -> None:
        self._release(request)
        request.forget_scores()
        self._start_chain(request)
        self.queues.move(request, self.queues.waiting)
        if event is not None:
            request.timeline.note(event, payload)

    def _release(self, request: Request) -> None:
        self.pending_blocks.discard(request.request_id)
        self.queues.waiting.on_leader_gone(request.request_id)
        self.drafts.release(request)
        plan = request.snapshot_plan
        used, plan.used = plan.used, []
        blocks, snapshots, running_slot = request.reset()
        for snapshot in snapshots:
            self._states.cancel(snapshot.block_hash)
            self.queues.waiting.cancelled(snapshot.block_hash)
        self.cache.release(blocks, used)
        if running_slot is not None:
            self.running_slots.give_back(running_slot)

    def check(self) -> None:
        """Assert every invariant between requests and pools (between steps)."""
        self.cache.check()
        check_ownership(self.queues, self.limits, self.cache, self.running_slots)
        self.drafts.check(self.queues)
        self.async_planner.check()
        self.disk_loads.check()
        check_sleepers(self.queues, self.limits.block_size, self.cache, self.pending_blocks)
