"""Applies plans: the one owner of queues, blocks, cache and live slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron_ext.config import EvictionPolicyName
from megatron_ext.prefix_cache.block_pool import BlockPool
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import Digest, HashChain, root_digest
from megatron_ext.scheduling.accounting import Reason
from megatron_ext.scheduling.ahead import AheadHashing
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.coordination import PendingBlocks, check_sleepers, is_lasting
from megatron_ext.scheduling.events import EventType
from megatron_ext.scheduling.live_slots import LiveSlots
from megatron_ext.scheduling.planner import Admission, Deferral, SchedulerLimits, StepPlan, plan_step
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots import Snapshot, prefill_positions

NO_TOKENS: Mapping[int, int] = MappingProxyType({})


@dataclass
class Counters:
    """What has happened since the engine started."""

    preemptions: int = 0
    pauses: int = 0
    hits: int = 0  # admissions that skipped something
    blocks_matched: int = 0
    skipped_tokens: int = 0  # prompt tokens that no layer computed
    prefill_tokens: int = 0  # prefill tokens computed, for the first time or again
    coordination_waits: int = 0  # requests that waited for another one's prefix


class Scheduler:
    """Moves requests through their lives, one step at a time: `schedule`, then `commit` or `abandon`.

    Between the two the step's requests must not be touched by anybody else.

    Args:
        limits: What the engine was built for.
        policy: What happens to cached blocks that nobody uses; None caches nothing.
        fingerprint: Whatever KV and states of equal tokens depend on, beside the weights' version.
        slots: For snapshots of recurrent states, of which there may be none; None if the model has no such states.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: EvictionPolicyName | None = None,
        fingerprint: bytes = b"",
        slots: int | None = None,
    ) -> None:
        self.limits = limits
        self.cache = PrefixCache(limits.total_blocks, policy, slots)
        self.queues = Queues(keeper=self.cache)
        self.pending_blocks = PendingBlocks()
        self.live_slots = LiveSlots(limits.max_requests)
        self.counters = Counters()
        self._hashing = AheadHashing()
        self._fingerprint = fingerprint
        self._weights_version = 0

    @property
    def blocks(self) -> BlockPool:
        """The pool under the cache."""
        return self.cache.pool

    def add(self, request: Request) -> None:
        """Let an admissible request wait for its turn."""
        self._start_chain(request)
        self._hashing.begin(request)
        self.queues.waiting.add(request)

    def _start_chain(self, request: Request) -> None:
        """Give a request the root of its keys, unless it has it already or stays away from the cache."""
        if not self.cache.is_enabled or not request.params.enable_prefix_caching:
            return
        salt = request.params.cache_salt
        root = root_digest(
            [
                self._fingerprint,
                self._weights_version.to_bytes(8, "little"),
                self.limits.block_size.to_bytes(8, "little"),
                *([] if salt is None else [salt.encode("utf-8", "surrogatepass")]),  # JSON has halves of characters
            ]
        )
        if request.sequence.chain is None or request.sequence.chain.root != root:
            request.sequence.chain = HashChain(root, self.limits.block_size)

    def schedule(self) -> StepPlan:
        """Plan the next step and put the plan into effect; the caller computes the plan's chunks."""
        plan = plan_step(self.queues, self.limits, self.cache, self.pending_blocks)
        for admission in plan.admissions:  # before anything is allocated, so that nothing matched is evicted
            self.cache.pin(admission.matched)
        for request, error in plan.failures:
            self.end(request, Status.FAILED, error=f"the KV pool is too small for this request: {error}")
        for request in plan.preemptions:
            self._requeue(request, EventType.EVICT)
            self.counters.preemptions += 1
        for request in plan.pauses:
            self.queues.move(request, self.queues.paused)
            request.timeline.note(EventType.PAUSE)
            self.counters.pauses += 1
        for request in plan.resumes:
            self.queues.move(request, self.queues.running)
        for chunk in plan.chunks:
            self._grow(chunk)
        for admission in plan.admissions:
            self._admit(admission)
        for deferral in plan.deferrals:
            self._note_follower(deferral)
        for chunk in sorted(plan.chunks, key=lambda chunk: chunk.is_decode):  # a free slot is prefill's before decode's
            self._reserve_snapshots(chunk)
        self._put_to_sleep(plan.deferrals)
        self._hashing.go_on()
        return plan

    def _grow(self, chunk: Chunk) -> None:
        request = chunk.request
        if request.block_table:  # admissions take theirs at once
            missing = self.limits.blocks_for(chunk.end) - len(request.block_table)
            request.sequence.block_table += self.cache.allocate(max(0, missing))

    def _admit(self, admission: Admission) -> None:
        request, matched = admission.request, admission.matched
        request.sequence.block_table = [*matched, *self.cache.allocate(admission.new_blocks)]
        request.sequence.live_slot = self.live_slots.take()
        request.sequence.computed_end = admission.chunk.start
        request.sequence.restore = admission.restore
        if admission.restore is not None:
            self.cache.states.consume(admission.restore.digest)
        request.sequence.shared_end = len(matched) * self.limits.block_size
        request.sequence.published_blocks = len(matched)
        request.sequence.cache_epoch = self.cache.epoch
        skipped_before = request.sequence.ledger.skipped
        request.sequence.ledger.admit(
            admission.chunk.start, len(matched), self.limits.block_size, self._general_reason(request)
        )
        self.pending_blocks.add(request.request_id, request.digests[len(matched) :])
        self.counters.skipped_tokens += request.sequence.ledger.skipped - skipped_before
        self._count_hit(admission)
        self.counters.blocks_matched += len(matched)
        self.queues.move(request, self.queues.running)
        request.timeline.note(EventType.ADD_CONTEXT)

    def _count_hit(self, admission: Admission) -> None:
        start = admission.chunk.start
        if start > 0:
            self.counters.hits += 1
            self.cache.count_hit(admission.matched[self.limits.blocks_for(start) - 1])

    def _general_reason(self, request: Request) -> Reason | None:
        """Why the whole prompt is computed, whatever is cached; None if that depends on the cache."""
        if not request.params.enable_prefix_caching:
            return Reason.OPTED_OUT
        if not self.cache.is_enabled:
            return Reason.CACHING_OFF
        return Reason.PROMPT_LOGPROBS if request.params.wants_prompt_log_probs else None

    def _note_follower(self, deferral: Deferral) -> None:
        if deferral.wait_for is not None and not deferral.request.sequence.has_waited_for_prefix:
            deferral.request.sequence.has_waited_for_prefix = True
            self.counters.coordination_waits += 1
        if deferral.snapshot is not None:
            wanted = deferral.snapshot
            self._reserve_snapshot(wanted.request, wanted.position, wanted.digest)

    def _put_to_sleep(self, deferrals: Iterable[Deferral]) -> None:
        """Whoever follows need not be looked at again before what it waits for has changed."""
        waiting, block_size = self.queues.waiting, self.limits.block_size
        leaders = {request.request_id: request for request in self.queues.running}
        for deferral in deferrals:
            if deferral.until is None or waiting.is_asleep(deferral.request):
                continue
            if is_lasting(deferral, leaders[deferral.wait_for], block_size, self.cache, self.pending_blocks):
                blocks = deferral.until // block_size
                waiting.sleep(deferral.request, deferral.wait_for, deferral.request.digests[blocks - 1], blocks)

    def _reserve_snapshots(self, chunk: Chunk) -> None:
        """Find slots for the states that the chunk should leave behind; what finds none is left out."""
        request, block_size = chunk.request, self.limits.block_size
        if (
            self.cache.states is None
            or request.sequence.chain is None
            or request.sequence.cache_epoch != self.cache.epoch
        ):
            return
        if chunk.is_decode:
            if chunk.end % block_size == 0:
                digest = request.digests[chunk.end // block_size - 1]
                self._reserve_snapshot(request, chunk.end, digest, in_decode=True)
            return
        for position in self._prefill_positions(chunk):
            self._reserve_snapshot(request, position, request.digests[position // block_size - 1])

    def _prefill_positions(self, chunk: Chunk) -> list[int]:
        block_size = self.limits.block_size
        if self.limits.aligned_chunks:
            return [chunk.end] if chunk.end % block_size == 0 else []
        request = chunk.request
        return prefill_positions(chunk.start, chunk.end, len(request.tokens), request.sequence.shared_end, block_size)

    def _reserve_snapshot(self, request: Request, position: int, digest: Digest, *, in_decode: bool = False) -> None:
        states = self.cache.states
        if states.find(digest) is not None or states.is_reserved(digest):
            return
        instead_of = request.sequence.decode_snapshot if in_decode else None
        slot = states.reserve(digest, is_optional=in_decode, instead_of=instead_of)
        if slot is not None:
            request.sequence.snapshots.append(Snapshot(position, digest, slot))
            if in_decode:
                request.sequence.decode_snapshot = digest

    def commit(self, chunks: Iterable[Chunk], sampled: Mapping[int, int] = NO_TOKENS) -> list[Request]:
        """The step's computation has succeeded. This is the one transition at its end, and it cannot fail.

        Computed intervals and ledgers grow, complete blocks and the snapshots passed can be found, new tokens are
        appended, and who got the last one, by its id or by count, ends. Texts come later, and undo nothing of this.

        Args:
            chunks: What was computed.
            sampled: Request id -> new token, for chunks that yield one.

        Returns:
            Who has ended.
        """
        chunks = tuple(chunks)
        self._advance(chunks)
        return self._extend([chunk.request for chunk in chunks], sampled)

    def _advance(self, chunks: Sequence[Chunk]) -> None:
        """The tokens of `chunks` are computed, and complete blocks can be found."""
        for chunk in chunks:
            request = chunk.request
            assert chunk.start == request.computed_end, (chunk.start, request.computed_end)
            before = request.prefill_token_count
            request.advance(chunk.end)
            self.counters.prefill_tokens += request.prefill_token_count - before
            self._publish(request)
            self._show_snapshots(request)

    def _extend(self, requests: Sequence[Request], sampled: Mapping[int, int]) -> list[Request]:
        """Give each request its new token, when all that the step computed can be found; who ends with it."""
        ended = []
        for request in requests:
            if request.request_id not in sampled:
                continue
            request.append(sampled[request.request_id])
            reason = request.reason_to_end
            if reason is not None:
                self.end(request, Status.COMPLETED, finish_reason=reason)
                ended.append(request)
        return ended

    def _show_snapshots(self, request: Request) -> None:
        """The states at the positions that the request has now reached are in their slots: let others find them."""
        for snapshot in request.sequence.snapshots:
            if snapshot.position <= request.computed_end:
                self.cache.states.commit(snapshot.digest)
                self.queues.waiting.published(snapshot.digest)
        request.sequence.snapshots = [one for one in request.sequence.snapshots if one.position > request.computed_end]

    def _publish(self, request: Request) -> None:
        """Index the blocks that the request has completed; what began in an earlier epoch is not published."""
        complete = request.computed_end // self.limits.block_size
        if (
            request.sequence.chain is None
            or complete <= request.sequence.published_blocks
            or request.sequence.cache_epoch != self.cache.epoch
        ):
            return
        digests = request.digests
        for i in range(request.sequence.published_blocks, complete):
            parent = digests[i - 1] if i else None
            request.sequence.block_table[i] = self.cache.publish(digests[i], request.block_table[i], parent)
            self.pending_blocks.published(request.request_id, digests[i])
            self.queues.waiting.published(digests[i])
        request.sequence.published_blocks = complete

    def abandon(self, chunks: Iterable[Chunk], reason: str) -> None:
        """The forward of `chunks` has failed: their pools hold anything now, so the requests start again."""
        for chunk in chunks:
            self._requeue(chunk.request, EventType.ERROR_TRANSIENT, reason)

    def end(
        self,
        request: Request,
        status: Status,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        is_fault: bool = False,
    ) -> None:
        """A request leaves; what it owned is free at once."""
        self._release(request)
        self.queues.discard(request)
        request.end(status, finish_reason=finish_reason, error=error, is_fault=is_fault)

    def suspend(self) -> None:
        """The pools are about to lose their contents: everybody waits, and keeps its tokens."""
        for request in [*self.queues.running, *self.queues.paused]:
            self._requeue(request)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Nothing cached before is matched after, and requests in flight publish nothing (EX-4)."""
        self.cache.reset()
        for request in self.queues:
            request.sequence.snapshots = []
        for request_id in self.pending_blocks.requests():
            self.pending_blocks.discard(request_id)
        self.queues.waiting.forget()

    def weights_changed(self) -> None:
        """The same for good reason: keys made from now on are of other weights."""
        self._weights_version += 1
        self.reset_prefix_cache()
        for request in self.queues.waiting:
            self._start_chain(request)
            self._hashing.resume(request)

    def _requeue(self, request: Request, event: EventType | None = None, payload: str | None = None) -> None:
        self._release(request)
        self._start_chain(request)
        self.queues.move(request, self.queues.waiting)
        if event is not None:
            request.timeline.note(event, payload)

    def _release(self, request: Request) -> None:
        self.pending_blocks.discard(request.request_id)
        self.queues.waiting.forsaken(request.request_id)
        blocks, snapshots, live_slot = request.sequence.lose_all()
        for snapshot in snapshots:
            self.cache.states.cancel(snapshot.digest)
            self.queues.waiting.cancelled(snapshot.digest)
        self.cache.release(blocks)
        if live_slot is not None:
            self.live_slots.give_back(live_slot)

    def check(self) -> None:
        """Assert every invariant between requests and pools (between steps)."""
        self.cache.check()
        held = Counter(block for request in self.queues for block in request.block_table)
        for block in range(self.cache.pool.total):
            assert self.cache.pool.references(block) == held[block], f"block {block}: references and tables disagree"
        self._check_reservations()
        check_sleepers(self.queues, self.limits.block_size, self.cache, self.pending_blocks)
        self.live_slots.check(
            [request.sequence.live_slot for request in self.queues if request.sequence.live_slot is not None]
        )
        for queue in (self.queues.waiting, self.queues.running, self.queues.paused):
            arrivals = [request.arrival for request in queue]
            assert arrivals == sorted(arrivals), f"out of order: {arrivals}"
        for request in self.queues:
            assert not request.is_ended, f"request {request.request_id} has ended and is still queued"
        for request in self.queues.waiting:
            assert not request.block_table, f"waiting {request.request_id} owns blocks"
            assert request.sequence.live_slot is None, f"waiting {request.request_id} owns a live slot"
            assert request.computed_end == 0, f"waiting {request.request_id} has computed tokens"
        for request in [*self.queues.running, *self.queues.paused]:
            self._check_owner(request)
        for request in self.queues.paused:
            assert request.is_decoding, f"paused {request.request_id} is mid-prefill"

    def _check_owner(self, request: Request) -> None:
        name = f"request {request.request_id}"
        assert request.sequence.live_slot is not None, f"{name} has no live slot"
        assert request.computed_end < len(request.tokens), f"{name} has nothing left to compute"
        computed, known = request.computed_end, len(request.tokens)
        fewest = self.limits.blocks_for(computed if request.is_decoding else known)
        most = self.limits.blocks_for(known)
        assert fewest <= len(request.block_table) <= most, f"{name} owns {len(request.block_table)} blocks"

    def _check_reservations(self) -> None:
        snapshots = [(request, one) for request in self.queues for one in request.sequence.snapshots]
        if self.cache.states is None:
            assert not snapshots, "snapshots of a model without states"
            return
        assert len(snapshots) == self.cache.states.total - self.cache.states.obtainable_count, "a slot is nobody's"
        for request, snapshot in snapshots:
            assert self.cache.states.is_reserved(snapshot.digest), f"request {request.request_id} has no slot reserved"
            assert snapshot.position > request.computed_end, f"request {request.request_id} has passed its snapshot"
