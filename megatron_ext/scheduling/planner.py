"""One step, decided: who decodes, who prefills which tokens, who is admitted, paused, resumed, evicted or failed.

Planning changes nothing. It reads the queues and the room there is, and returns a `StepPlan` that can be applied
without failing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.errors import CapacityError
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import Digest
from megatron_ext.prefix_cache.matching import Restore, last_boundary, resume_point
from megatron_ext.scheduling.coordination import BlocksInFlight
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Chunk, Request
from megatron_ext.scheduling.snapshots import common_blocks


@dataclass(frozen=True)
class Limits:
    """What the engine was built for; constant."""

    block_size: int  # tokens
    total_blocks: int
    paused_blocks: int | None  # blocks that paused requests may keep; None is no limit
    max_requests: int
    max_tokens: int  # a step
    max_sequence_length: int
    chunked_prefill: bool

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True)
class Room:
    """What is left at some point of planning a step."""

    blocks: int  # free ones, evictable ones, and what those who leave in this step release
    requests: int
    tokens: int
    slots: int = 0  # for snapshots that followers wait for
    released: frozenset[BlockId] = frozenset()  # the last of the blocks
    pinned: frozenset[BlockId] = frozenset()  # evictable and released blocks that the plan uses, no longer counted


@dataclass(frozen=True)
class Admission:
    """A waiting request enters the batch: all its blocks are taken now, and this much is computed in this step.

    Args:
        matched: Cached blocks that it shares, from its start.
        new_blocks: Blocks that it takes beside them.
        chunk: What is computed first; it starts at the resume position.
        restore: The snapshot of the states at the resume position; None if there are none to restore.
    """

    request: Request
    matched: tuple[BlockId, ...]
    new_blocks: int
    chunk: Chunk
    restore: Restore | None = None


@dataclass(frozen=True)
class Wish:
    """A snapshot that the leader of a follower must take, for the follower to resume from (KV-6).

    Args:
        leader: The request that will compute the states.
        position: Tokens that both begin with; a block boundary.
        digest: Of the block that ends there.
    """

    leader: Request
    position: int
    digest: Digest


@dataclass(frozen=True)
class Refusal:
    """A waiting request does not enter the batch in this step, but can in a later one.

    What can never be served is turned away before it waits (see `check_admissible`) or fails (see `StepPlan.failures`).
    """

    request: Request
    resource: str  # "blocks", "requests", "tokens", or "prefix": another request is computing its next block
    needed: int
    available: int
    wait_for: int | None = None  # the request id of that leader
    wish: Wish | None = None  # what the leader is to leave behind for it; None in a model without recurrent layers


Failure = tuple[Request, CapacityError]


@dataclass(frozen=True)
class StepPlan:
    """What a step does. Nobody is in two of the tuples of moves; chunks are decodes first, then prefills."""

    evictions: tuple[Request, ...]
    pauses: tuple[Request, ...]
    resumes: tuple[Request, ...]
    failures: tuple[Failure, ...]
    admissions: tuple[Admission, ...]
    chunks: tuple[Chunk, ...]
    refusals: tuple[Refusal, ...]  # followers of other requests, and at last whoever must wait for room

    @property
    def refusal(self) -> Refusal | None:
        """Why the first request that must wait for room has to; None if nobody has to."""
        return next((refusal for refusal in self.refusals if refusal.wait_for is None), None)


def check_admissible(request: Request, limits: Limits) -> CapacityError | None:
    """What makes a new request impossible to serve, whatever else runs; None if nothing does."""
    length = request.prompt_length + request.params.num_tokens_to_generate
    if length > limits.max_sequence_length:
        return CapacityError("sequence_length", length, limits.max_sequence_length, is_transient=False)
    if limits.blocks_for(request.prompt_length) > limits.total_blocks:
        blocks = limits.blocks_for(request.prompt_length)
        return CapacityError("blocks", blocks, limits.total_blocks, is_transient=False)
    if not limits.chunked_prefill and request.prompt_length > limits.max_tokens:
        return CapacityError("tokens", request.prompt_length, limits.max_tokens, is_transient=False)
    return None


def plan_step(queues: Queues, limits: Limits, cache: PrefixCache, in_flight: BlocksInFlight) -> StepPlan:
    """Decide one step.

    Older requests come first everywhere: for blocks to grow into, for prefill tokens, for admission (only followers of
    another request's prefix are overtaken). Requests that decode come before prefill in the token budget
    (`max_tokens >= max_requests` leaves room for both).
    """
    growth = _plan_growth(queues, limits, cache)
    decodes = [Chunk(request, request.computed_end, len(request.tokens)) for request in growth.decoding]
    continued = _plan_continuations(growth.prefilling, limits.max_tokens - len(decodes))
    entry = _Entry([], [], [])
    if not growth.paused and not growth.evicted:  # those were here first
        room = Room(
            blocks=growth.free_blocks,
            requests=limits.max_requests - len(growth.decoding) - len(growth.prefilling),
            tokens=limits.max_tokens - len(decodes) - sum(chunk.length for chunk in continued),
            slots=cache.states.obtainable_count if cache.states is not None else 0,
            released=growth.released,
        )
        entry = _plan_admissions(queues, limits, room, cache, in_flight)
    chunks = [*decodes, *continued, *(admission.chunk for admission in entry.admissions)]
    return StepPlan(
        evictions=tuple(growth.evicted),
        pauses=tuple(request for request in growth.paused if request in queues.running),
        resumes=tuple(request for request in growth.decoding if request in queues.paused),
        failures=(*growth.failed, *entry.failed),
        admissions=tuple(entry.admissions),
        # Of an evicted request a single generated token may be computed again: to the layers that is a decode as well.
        chunks=tuple(sorted(chunks, key=lambda chunk: not chunk.is_decode)),
        refusals=tuple(entry.refusals),
    )


@dataclass
class _Growth:
    """The requests in the batch, sorted by what becomes of them in this step."""

    prefilling: list[Request]
    decoding: list[Request]
    paused: list[Request]
    evicted: list[Request]
    failed: list[Failure]
    free_blocks: int
    released: frozenset[BlockId]  # those of them that the evicted and the failed still hold


def _plan_growth(queues: Queues, limits: Limits, cache: PrefixCache) -> _Growth:
    """Who gets the block that its next token needs.

    A request that outgrows the pool fails. One that finds no free block is paused and keeps what it has. The youngest
    paused request is evicted while the paused ones keep more than their budget, or while nobody else could run.
    """
    growing = sorted([*queues.paused, *(r for r in queues.running if r.is_decoding)], key=lambda r: r.arrival)
    prefilling = [request for request in queues.running if not request.is_decoding]
    failed = [(request, error) for request in growing if (error := _check_fits_pool(request, limits)) is not None]
    leaving = [request for request, _ in failed]
    growing = [request for request in growing if request not in leaving]

    evicted: list[Request] = []
    while True:
        released = cache.releasable(request.block_table for request in [*leaving, *evicted])
        decoding, paused, left = _share_blocks(growing, limits, cache.available_count + len(released))
        kept = len({block for request in paused for block in request.block_table})
        over_budget = limits.paused_blocks is not None and kept > limits.paused_blocks
        stuck = bool(paused) and not decoding and not prefilling
        if not over_budget and not stuck:
            return _Growth(prefilling, decoding, paused, evicted, failed, left, frozenset(released))
        youngest = paused[-1]
        growing.remove(youngest)
        evicted.append(youngest)


def _check_fits_pool(request: Request, limits: Limits) -> CapacityError | None:
    """What ends a request that was admissible: its tokens have outgrown the whole pool."""
    needed = limits.blocks_for(len(request.tokens))
    if needed > limits.total_blocks:
        return CapacityError("blocks", needed, limits.total_blocks, is_transient=False)
    return None


def _share_blocks(
    growing: Iterable[Request], limits: Limits, free_blocks: int
) -> tuple[list[Request], list[Request], int]:
    """Give free blocks to those who need one, in the given order: who decodes, who must pause, blocks left."""
    decoding, paused = [], []
    for request in growing:
        needed = limits.blocks_for(len(request.tokens)) - len(request.block_table)
        if needed <= free_blocks:
            decoding.append(request)
            free_blocks -= needed
        else:
            paused.append(request)
    return decoding, paused, free_blocks


def _plan_continuations(prefilling: Sequence[Request], tokens: int) -> list[Chunk]:
    """The next chunk of every request that is mid-prefill, oldest first, as far as the tokens go."""
    chunks = []
    for request in prefilling:
        length = min(len(request.tokens) - request.computed_end, tokens)
        if length > 0:
            chunks.append(Chunk(request, request.computed_end, request.computed_end + length))
            tokens -= length
    return chunks


@dataclass
class _Entry:
    """What becomes of waiting requests."""

    admissions: list[Admission]
    refusals: list[Refusal]
    failed: list[Failure]


def _plan_admissions(
    queues: Queues, limits: Limits, room: Room, cache: PrefixCache, in_flight: BlocksInFlight
) -> _Entry:
    """Admit waiting requests in order until one has to wait for room.

    A request whose next block another one computes waits for that, and is overtaken; so do those behind a leader
    admitted in this very step. A request fails here if its last token outgrew the pool just before a suspend sent it
    back to wait.
    """
    entry = _Entry([], [], [])
    leaders = _Leaders(queues.running, in_flight)
    wished: set[Digest] = set()
    for request in queues.waiting:
        error = _check_fits_pool(request, limits)
        if error is not None:
            entry.failed.append((request, error))
            continue
        matched = cache.match(request.digests) if reads_cache(request) else []
        leader = leaders.of(request, len(matched)) if reads_cache(request) else None
        following = None if leader is None else _follow(request, len(matched), leader, limits, room, cache, wished)
        if following is not None:
            entry.refusals.append(following)
            if following.wish is not None and following.wish.digest not in wished:
                wished.add(following.wish.digest)
                room = dataclasses.replace(room, slots=room.slots - 1)
            continue
        decision, room = plan_admission(request, matched, limits, room, cache)
        if isinstance(decision, Refusal):
            entry.refusals.append(decision)
            break
        entry.admissions.append(decision)
        leaders.add(decision)
    return entry


def reads_cache(request: Request) -> bool:
    """Whether cached blocks may stand in for computing: not if the prompt's own log-probs are asked for."""
    return request.chain is not None and not request.params.wants_prompt_log_probs


class _Leaders:
    """Who computes what: running requests, and those that this step admits."""

    def __init__(self, running: Iterable[Request], in_flight: BlocksInFlight) -> None:
        self._running = {request.request_id: request for request in running}
        self._in_flight = in_flight
        self._planned: dict[Digest, Chunk] = {}

    def add(self, admission: Admission) -> None:
        """This one is about to compute what it did not match."""
        digests = admission.request.digests[len(admission.matched) :]
        self._planned |= dict.fromkeys(digests, admission.chunk)

    def of(self, request: Request, matched: int) -> tuple[Request, int] | None:
        """The request that computes the first block that `request` lacks, and what it has computed before this step."""
        if matched == len(request.digests):
            return None
        following = request.digests[matched]
        if following in self._planned:
            chunk = self._planned[following]
            return chunk.request, chunk.start
        request_id = self._in_flight.leader(following)
        if request_id is None:
            return None
        leader = self._running[request_id]
        return leader, leader.computed_end


def _follow(
    request: Request,
    matched: int,
    leader: tuple[Request, int],
    limits: Limits,
    room: Room,
    cache: PrefixCache,
    wished: Collection[Digest],
) -> Refusal | None:
    """Wait for the leader, if that saves anything: None if not.

    With recurrent layers it does if the leader has yet to pass the last boundary that both have in common, and a slot
    can be had for the states there.
    """
    leading, computed_end = leader
    refusal = Refusal(request, "prefix", 1, 0, wait_for=leading.request_id)
    if cache.states is None:
        return refusal
    block_size = limits.block_size
    digests = request.digests
    common = common_blocks(digests, leading.digests) * block_size
    position = min(common, last_boundary(len(request.tokens), block_size))
    resume = resume_point(len(request.tokens), digests[:matched], block_size, cache.states)
    if position <= max(computed_end, resume.position):
        return None
    digest = digests[position // block_size - 1]
    if cache.states.is_reserved(digest):
        return refusal
    if digest not in wished and room.slots < 1:
        return None
    return dataclasses.replace(refusal, wish=Wish(leading, position, digest))


def plan_admission(
    request: Request, matched: Sequence[BlockId], limits: Limits, room: Room, cache: PrefixCache
) -> tuple[Admission | Refusal, Room]:
    """Whether `request` can enter the batch now, and with which first chunk; and the room that is left then.

    It takes the blocks of all its tokens at once, so that a prefill that has begun never waits for memory. Tokens
    before the resume position cost nothing of the step's token budget. What was generated before an eviction is
    prefilled again; if that does not fit a step, it is cut even where chunked prefill is off, because the request was
    already served so far.
    """
    length = len(request.tokens)
    if room.requests < 1:
        return Refusal(request, "requests", 1, 0), room
    new_blocks = limits.blocks_for(length) - len(matched)
    newly_pinned = {block for block in matched if cache.is_retired(block) or block in room.released} - room.pinned
    blocks = new_blocks + len(newly_pinned)
    if blocks > room.blocks:
        return Refusal(request, "blocks", blocks, room.blocks), room
    resume = resume_point(length, request.digests[: len(matched)], limits.block_size, cache.states)
    start = resume.position
    may_cut = limits.chunked_prefill or length > limits.max_tokens
    needed_tokens = 1 if may_cut else length - start
    if needed_tokens > room.tokens:
        return Refusal(request, "tokens", needed_tokens, room.tokens), room
    chunk = Chunk(request, start, min(length, start + room.tokens))
    left = dataclasses.replace(
        room,
        blocks=room.blocks - blocks,
        requests=room.requests - 1,
        tokens=room.tokens - chunk.length,
        pinned=room.pinned | newly_pinned,
    )
    return Admission(request, tuple(matched), new_blocks, chunk, resume.restore), left
