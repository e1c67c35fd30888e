"""Step planning: choose which requests decode, prefill, enter, pause, resume or are preempted.

Planning changes nothing. It reads the queues, the cache and the limits, and returns a `StepPlan` that can be applied
without failing.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import ResumePoint, resume_point
from megatron_ext.scheduling.block_hasher import HASH_SLICE, within_slice
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.forks import ForkPlanner
from megatron_ext.scheduling.kept_data import usable_blocks
from megatron_ext.scheduling.plan import Admission, Deferral, SchedulerLimits, StepBudget, StepPlan, work_from
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks, PrefixLeaders, wait_for_prefix
from megatron_ext.scheduling.prefix_wait.waiting_queue import WaitingQueue
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.opportunistic_plan import place_opportunistic, plan_opportunistic
from megatron_ext.scheduling.snapshots.snapshot_planner import plan_snapshots
from megatron_ext.scheduling.snapshots.snapshot_positions import cut_aligned, prefill_stops
from megatron_ext.scheduling.spec_decode.verification import NO_TOKENS, TokensById, with_drafts
from megatron_ext.scheduling.waiting_order import Line

if TYPE_CHECKING:
    from megatron_ext.scheduling.disk_loads import DiskLoads


def reason_to_refuse(request: Request, limits: SchedulerLimits) -> str | None:
    """Return why a new request can never be served, whatever else runs, and the remedy; None if it is admissible."""
    prompt, generated = request.prompt_length, request.params.num_tokens_to_generate
    if prompt + generated > limits.max_sequence_length:
        return (
            f"{prompt} tokens of prompt and {generated} to generate are {prompt + generated}, and a sequence has at "
            f"most {limits.max_sequence_length}; shorten the prompt, or generate fewer"
        )
    known = len(request.tokens)  # more than the prompt if an output is continued
    if limits.blocks_for(known) > limits.total_blocks:
        return (
            f"{known} tokens need {limits.blocks_for(known)} blocks, and the KV pool has {limits.total_blocks}, for "
            f"{limits.pool_tokens} tokens; shorten the prompt, or enlarge the pool "
            "(--inference-dynamic-batching-buffer-size-gb or -block-count)"
        )
    if not limits.chunked_prefill and prompt > limits.max_tokens:
        return (
            f"{prompt} tokens of prompt do not fit into a step, which has at most {limits.max_tokens}; shorten the "
            "prompt, or give the engine --enable-chunked-prefill"
        )
    return None


def plan_step(
    queues: Queues,
    limits: SchedulerLimits,
    cache: PrefixCache,
    pending_blocks: PendingBlocks,
    proposals: TokensById = NO_TOKENS,
    disk_loads: DiskLoads | None = None,
    leaving: Collection[Request] = (),
    *,
    free_draft_states: int = 0,
    holds_prefills: bool = False,
) -> StepPlan:
    """Plan one step.

    Older requests come first for blocks to grow into and for prefill tokens, and the order of waiting requests decides
    on admissions (`WaitingOrder`); followers of another request's prefix are overtaken. Requests that decode come first
    in the token budget (`max_tokens >= max_requests` leaves room for both), and bound its prefill tokens
    (`SchedulerLimits.prefill_limit`); with `holds_prefills` they have the step to themselves. A prefill that has begun
    is finished before another begins, unless `SchedulerLimits.may_prefill` allows more in one step. Drafts of requests
    that decode get the remaining tokens, free blocks and slots for their states. A request whose token mask is
    missing is left out (SE-10). A request that waits for entries on disk (`disk_loads`) is overtaken. Requests that
    leave before the step (`leaving`) keep their blocks until then, and are not in it.
    """
    growth = _plan_growth(queues, limits, cache, leaving)
    decodes = [Chunk(one, one.computed_end, len(one.tokens)) for one in growth.decoding]
    begun = [(request, request.computed_end) for request in growth.prefilling]
    prefill_limit = limits.prefill_limit(len(decodes), is_held=holds_prefills)
    tokens = limits.max_tokens - len(decodes)
    continued = plan_continuations(begun, limits, tokens if prefill_limit is None else min(tokens, prefill_limit))
    entry = _Entry([], [])
    if len(queues.waiting) and not growth.paused and not growth.preempted:  # these go first, whatever the policy
        kept = cache.kept_for_snapshots if len(queues.running) else 0
        budget = StepBudget(
            blocks=max(0, growth.free_blocks - kept),
            requests=limits.max_requests - len(growth.decoding) - len(growth.prefilling) - growth.held,
            tokens=tokens - sum(chunk.length for chunk in continued),
            slots=cache.states.obtainable_count if cache.states is not None else 0,
            prefills=len(continued),
            prefill_tokens=sum(chunk.length for chunk in continued),
            prefill_limit=prefill_limit,
        )
        entry = _plan_admissions(queues, limits, budget, cache, pending_blocks, disk_loads, continued)
    chunks = [*decodes, *continued, *[admission.chunk for admission in entry.admissions]]
    if limits.aligned_chunks and entry.deferrals:
        chunks = _cut_for_followers(chunks, entry.deferrals)
    chunks = with_drafts(chunks, entry.admissions, proposals, free_draft_states, limits, cache)
    if continued or entry.admissions or proposals:  # not decodes alone
        sources = [one.chunk.source for one in entry.admissions if one.chunk.source is not None]
        assert all(one in chunks for one in sources), "no boundary lies inside of the last chunk of a prompt"
        # A preempted request may have to compute a single generated token again: a decode as well to the layers.
        chunks.sort(key=lambda chunk: (chunk.source is not None, not chunk.is_decode))
    wanted = plan_snapshots(chunks, entry.admissions, entry.deferrals, limits, cache)
    admissions = place_opportunistic(entry.admissions, continued, wanted, limits, cache)
    return StepPlan(
        preemptions=tuple(growth.preempted),
        pauses=tuple([request for request in growth.paused if request in queues.running]),
        resumes=tuple([request for request in queues.paused if request in growth.decoding]),
        admissions=tuple(admissions),
        chunks=tuple(chunks),
        snapshots=(*wanted, *plan_opportunistic(continued, admissions, wanted, limits, cache)),
        deferrals=tuple(entry.deferrals),
    )


@dataclass
class _Growth:
    """Requests in the batch, sorted by their part in this step."""

    prefilling: list[Request]
    decoding: list[Request]
    paused: list[Request]
    preempted: list[Request]
    free_blocks: int
    held: int  # requests that keep their blocks and slots and are left out until their token masks are known


def _plan_growth(queues: Queues, limits: SchedulerLimits, cache: PrefixCache, leaving: Collection[Request]) -> _Growth:
    """Distribute free blocks among the requests in the batch that need one for their next token.

    A request that finds no free block is paused and keeps its blocks and slot. The youngest paused request is preempted
    while the paused ones keep more than their budget, or while no other request could run. The oldest goes on: no
    request outgrows the pool (see `Request.end_within`).
    """
    growing: list[Request] = []
    prefilling: list[Request] = []
    ready = [request for request in queues.running if not request.lacks_mask and request not in leaving]
    held = len(queues.running) - len(leaving) - len(ready)
    for request in ready:
        (growing if request.is_decoding else prefilling).append(request)
    if len(queues.paused):
        growing = sorted([*queues.paused, *growing], key=attrgetter("arrival"))
    missing = {request: limits.missing_blocks(request, len(request.tokens)) for request in growing}
    preempted: list[Request] = []
    while True:
        released = cache.pool.releasable([request.block_table for request in preempted])
        decoding, paused, left = _share_blocks(growing, missing, cache.available_count + len(released))
        kept = {block for request in paused for block in request.block_table} if paused else ()
        over_budget = limits.paused_blocks is not None and len(kept) > limits.paused_blocks
        stuck = bool(paused) and not decoding and not prefilling and not held
        if not over_budget and not stuck:
            return _Growth(prefilling, decoding, paused, preempted, left, held)
        youngest = paused[-1]
        growing.remove(youngest)
        preempted.append(youngest)


def _share_blocks(
    growing: Iterable[Request], missing: Mapping[Request, int], free_blocks: int
) -> tuple[list[Request], list[Request], int]:
    """Give free blocks to requests that need some, in the given order: decoding, paused, blocks left."""
    decoding, paused = [], []
    for request in growing:
        if missing[request] <= free_blocks:
            decoding.append(request)
            free_blocks -= missing[request]
        else:
            paused.append(request)
    return decoding, paused, free_blocks


def plan_continuations(begun: Iterable[tuple[Request, int]], limits: SchedulerLimits, tokens: int) -> list[Chunk]:
    """Plan the next chunks of prefills, in the order in which they began, within the budgets.

    Args:
        begun: Requests that are mid-prefill, each with the position up to which it is computed before the step.
        limits: Limits of the engine.
        tokens: Maximum tokens of all chunks together.
    """
    chunks: list[Chunk] = []
    for request, start in begun:
        if not limits.may_prefill(len(chunks), sum(chunk.length for chunk in chunks)):
            break
        end = chunk_end(request, start, request.shared_end, limits, tokens)
        if end > start:
            chunks.append(Chunk(request, start, end))
            tokens -= chunks[-1].length
    return chunks


def chunk_end(request: Request, start: int, shared_end: int, limits: SchedulerLimits, tokens: int) -> int:
    """Return the end of a prefill chunk from `start` of at most `tokens` tokens; `start` if it gets none."""
    length = len(request.tokens)
    end = min(length, start + max(0, tokens))
    audit = request.audit
    if audit is not None and start < audit.resume:  # the states there are compared
        end = min(end, audit.resume)
    if not limits.aligned_chunks or request.chain is None:
        return end
    cached = request.snapshot_plan.cached_end(shared_end // limits.block_size)
    stops = prefill_stops(length, cached * limits.block_size, limits.block_size)
    return cut_aligned(start, end, length, [*stops, *(one.position for one in request.snapshots)], limits.block_size)


def _cut_for_followers(chunks: Iterable[Chunk], deferrals: Iterable[Deferral]) -> list[Chunk]:
    """Cut chunks of leaders where a follower needs the states: a chunk leaves snapshots only at its end."""
    wanted: dict[int, list[int]] = {}
    for deferral in deferrals:
        if deferral.snapshot is not None:
            wanted.setdefault(deferral.snapshot.request.request_id, []).append(deferral.snapshot.position)
    cut = []
    for chunk in chunks:
        inside = [p for p in wanted.get(chunk.request.request_id, ()) if chunk.start < p < chunk.end]
        cut.append(dataclasses.replace(chunk, end=min([chunk.end, *inside])))
    return cut


@dataclass
class _Entry:
    """Decisions on waiting requests."""

    admissions: list[Admission]
    deferrals: list[Deferral]
    is_full: bool = False  # a request that waits for no leader did not fit, so all after it wait

    def wait(self, deferral: Deferral, line: Line) -> None:
        """Note a request that waits for something other than its turn."""
        self.deferrals.append(deferral)
        line.hold(deferral.request)

    def follow(self, following: Deferral, requested: set[BlockHash], budget: StepBudget, line: Line) -> StepBudget:
        """Note a request that waits for a prefix, and the snapshot that its leader takes; return the budget left."""
        self.wait(following, line)
        if following.snapshot is None or following.snapshot.block_hash in requested:
            return budget
        requested.add(following.snapshot.block_hash)
        return dataclasses.replace(budget, slots=budget.slots - 1)

    def fork(self, admission: Admission, left: StepBudget, budget: StepBudget, line: Line) -> StepBudget:
        """Note a fork, unless it may not pass an earlier request; return the budget left."""
        if not line.may_pass(admission.request, admission.work):
            return budget
        self.admissions.append(admission)
        line.admit(admission.request, admission.work)
        return left

    def note(self, decision: Admission | Deferral) -> None:
        """Note the decision on the next request in the queue; decisions after the first lack of room are dropped."""
        if self.is_full:
            return
        if isinstance(decision, Admission):
            self.admissions.append(decision)
        else:
            self.deferrals.append(decision)
            self.is_full = True


def _plan_admissions(
    queues: Queues,
    limits: SchedulerLimits,
    budget: StepBudget,
    cache: PrefixCache,
    pending_blocks: PendingBlocks,
    disk_loads: DiskLoads | None,
    continued: Sequence[Chunk],
) -> _Entry:
    """Admit waiting requests in order until one has to wait for room.

    Under `lpm` a request that may not pass an earlier one has its turn after that one (see `Line`).

    A request whose next block another request computes waits for that prefix and is overtaken, even if that leader is
    admitted in this very step. Sleeping followers are not looked at. Samples of a prompt whose prefill ends in this
    step enter as forks, and wait for that step if it is yet to come.

    Once the step has all its prefills, the next requests are examined all the same but not admitted: one of them may
    follow a leader that has begun, and must register while that leader can still take a snapshot for it.
    """
    entry = _Entry([], [])
    leaders = PrefixLeaders(queues.running, pending_blocks)
    requested: set[BlockHash] = set()
    line, forks = queues.waiting.line(), ForkPlanner(queues, continued, limits, cache)
    forks.join_sleepers(line, queues.waiting)
    for request in within_slice(line, HASH_SLICE):
        if request.lacks_mask:  # it was requeued meanwhile
            entry.wait(Deferral(request, "mask", 1, 0), line)
            continue
        forked = forks.plan(request, budget)
        if forked is not None:
            budget = entry.fork(*forked, budget, line)
            continue
        matched = cache.match(request.block_hashes) if reads_cache(request) else []
        leader = leaders.of(request, len(matched)) if may_wait_for_prefix(request, matched, queues.waiting) else None
        following = (
            None if leader is None else wait_for_prefix(request, len(matched), leader, limits, budget, cache, requested)
        )
        if following is not None:
            budget = entry.follow(following, requested, budget, line)
            continue
        load = None if disk_loads is None else disk_loads.awaited_by(request, len(matched))
        if load is not None:
            entry.wait(Deferral(request, "disk", 1, 0, load=load), line)
            continue
        source = forks.awaited_source(request)
        if source is not None:
            entry.wait(Deferral(request, "prompt", 1, 0, wait_for=source.request_id), line)
            continue
        if (
            not entry.is_full
            and line.overtakes(request)
            and not line.may_pass(request, _work_of(request, matched, limits, cache))
        ):
            continue
        has_room = budget.has_prefill_room and limits.may_prefill(budget.prefills, budget.prefill_tokens)
        decision, budget = plan_admission(request, matched, limits, budget, cache)
        entry.note(decision if has_room else Deferral(request, "prefills", 1, 0))
        if isinstance(decision, Deferral):
            break
        if not entry.is_full:
            line.admit(request, decision.work)
            leaders.add(decision)
            forks.add(decision.chunk)
            _wake_disturbed(request, leaders, queues.waiting, line, cache)
    return entry


def _wake_disturbed(
    request: Request, leaders: PrefixLeaders, waiting: WaitingQueue, line: Line, cache: PrefixCache
) -> None:
    """Examine sleeping followers again whose leader may change because `request` was just admitted."""
    for disturbed in leaders.disturbed(request, waiting.leaders()) if cache.states is not None else ():
        line.join(waiting.followers_of(disturbed), only_later=True)


def reads_cache(request: Request) -> bool:
    """Return whether cached blocks may replace computation; see `general_reason`."""
    return request.ledger.general_reason is None


def reads_disk(request: Request) -> bool:
    """Return whether entries on disk, with which no data is kept, may replace computation."""
    return reads_cache(request) and not request.needed_data


def may_wait_for_prefix(request: Request, matched: Sequence[BlockId], waiting: WaitingQueue) -> bool:
    """Return whether to look for a leader: not if the promised blocks were published and evicted before its turn.

    Where blocks are evicted that fast, requests would wait for one leader after the other, as a queue of one.
    """
    return reads_cache(request) and len(matched) >= waiting.promised_blocks(request)


def _work_of(request: Request, matched: Sequence[BlockId], limits: SchedulerLimits, cache: PrefixCache) -> int:
    return work_from(request, resume_of(request, matched, limits, cache).position)


def resume_of(request: Request, matched: Sequence[BlockId], limits: SchedulerLimits, cache: PrefixCache) -> ResumePoint:
    """Return where a waiting request would resume if it were admitted now."""
    usable = usable_blocks(request, len(matched), cache)
    hashes = request.block_hashes[:usable]
    return resume_point(len(request.tokens), hashes, limits.block_size, cache.states, cache.depth_of)


def plan_admission(
    request: Request, matched: Sequence[BlockId], limits: SchedulerLimits, budget: StepBudget, cache: PrefixCache
) -> tuple[Admission | Deferral, StepBudget]:
    """Decide whether `request` enters the batch now, and with which first chunk; return the remaining budget, too.

    An admission takes the blocks of all tokens at once, so that a prefill that has begun never waits for memory. Tokens
    before the resume position cost nothing of the step's token budget. Tokens generated before a preemption are
    prefilled again; if they do not fit a step, the prefill is cut even where chunked prefill is off, because the
    request was already served so far.
    """
    length = len(request.tokens)
    if budget.requests < 1:
        return Deferral(request, "requests", 1, 0), budget
    new_blocks = limits.blocks_for(length) - len(matched)
    in_use = _blocks_in_use(matched, budget, cache)
    blocks = new_blocks + len(matched) - in_use
    if blocks > budget.blocks:
        return Deferral(request, "blocks", blocks, budget.blocks), budget
    resume = resume_of(request, matched, limits, cache)
    start = resume.position
    may_cut = limits.chunked_prefill or length > limits.max_tokens
    end = chunk_end(request, start, len(matched) * limits.block_size, limits, budget.chunk_tokens)
    if end == start or (end < length and not may_cut):
        return Deferral(request, "tokens", 1 if may_cut else length - start, budget.tokens), budget
    chunk, shared = Chunk(request, start, end), tuple(matched)
    left = dataclasses.replace(
        budget,
        blocks=budget.blocks - blocks,
        requests=budget.requests - 1,
        tokens=budget.tokens - chunk.length,
        prefills=budget.prefills + 1,
        prefill_tokens=budget.prefill_tokens + chunk.length,
        pinned=budget.pinned.union(shared[in_use:]),
    )
    usable = usable_blocks(request, len(matched), cache)
    return Admission(request, shared, new_blocks, chunk, resume.restore, usable_blocks=usable), left


def _blocks_in_use(matched: Sequence[BlockId], budget: StepBudget, cache: PrefixCache) -> int:
    """Return how many of the matched blocks cost nothing of the available ones: those in use or pinned by this plan.

    They are the first ones: a request that uses a block uses all blocks before it.
    """

    def is_available(block: BlockId) -> bool:
        return block not in budget.pinned and cache.is_evictable(block)

    return bisect.bisect_left(matched, True, key=is_available)
