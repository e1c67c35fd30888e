"""One step, decided: who decodes, who prefills which tokens, who is admitted, paused, resumed, evicted or failed.

Planning changes nothing. It reads the queues and the room there is, and returns a `StepPlan` that can be applied
without failing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.errors import CapacityError
from megatron_ext.scheduling.queue import Queues
from megatron_ext.scheduling.request import Chunk, Request


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

    blocks: int
    requests: int
    tokens: int


@dataclass(frozen=True)
class Admission:
    """A waiting request enters the batch: all its blocks are taken now, and this much is computed in this step."""

    request: Request
    blocks: int
    chunk: Chunk


@dataclass(frozen=True)
class Refusal:
    """A waiting request does not enter the batch in this step, but can in a later one.

    What can never be served is turned away before it waits (see `check_admissible`) or fails (see `StepPlan.failures`).
    """

    request: Request
    resource: str  # "blocks", "requests" or "tokens"
    needed: int
    available: int


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
    refusal: Refusal | None  # why the first request left waiting is still waiting


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


def plan_step(queues: Queues, limits: Limits, free_blocks: int) -> StepPlan:
    """Decide one step.

    Older requests come first everywhere: for blocks to grow into, for prefill tokens, for admission. Requests that
    decode come before prefill in the token budget (`max_tokens >= max_requests` leaves room for both).
    """
    growth = _plan_growth(queues, limits, free_blocks)
    decodes = [Chunk(request, request.computed_end, len(request.tokens)) for request in growth.decoding]
    continued = _plan_continuations(growth.prefilling, limits.max_tokens - len(decodes))
    admissions: list[Admission] = []
    refusal = None
    failed = growth.failed
    if not growth.paused and not growth.evicted:  # those were here first
        room = Room(
            blocks=growth.free_blocks,
            requests=limits.max_requests - len(growth.decoding) - len(growth.prefilling),
            tokens=limits.max_tokens - len(decodes) - sum(chunk.length for chunk in continued),
        )
        admissions, refusal, failed_waiting = _plan_admissions(queues.waiting, limits, room)
        failed = failed + failed_waiting
    chunks = [*decodes, *continued, *(admission.chunk for admission in admissions)]
    return StepPlan(
        evictions=tuple(growth.evicted),
        pauses=tuple(request for request in growth.paused if request in queues.running),
        resumes=tuple(request for request in growth.decoding if request in queues.paused),
        failures=tuple(failed),
        admissions=tuple(admissions),
        # Of an evicted request a single generated token may be computed again: to the layers that is a decode as well.
        chunks=tuple(sorted(chunks, key=lambda chunk: not chunk.is_decode)),
        refusal=refusal,
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


def _plan_growth(queues: Queues, limits: Limits, free_blocks: int) -> _Growth:
    """Who gets the block that its next token needs.

    A request that outgrows the pool fails. One that finds no free block is paused and keeps what it has. The youngest
    paused request is evicted while the paused ones keep more than their budget, or while nobody else could run.
    """
    growing = sorted([*queues.paused, *(r for r in queues.running if r.is_decoding)], key=lambda r: r.arrival)
    prefilling = [request for request in queues.running if not request.is_decoding]
    failed = [(request, error) for request in growing if (error := _check_fits_pool(request, limits)) is not None]
    for request, _ in failed:
        growing.remove(request)
        free_blocks += len(request.block_table)

    evicted: list[Request] = []
    while True:
        decoding, paused, left = _share_blocks(growing, limits, free_blocks)
        kept = sum(len(request.block_table) for request in paused)
        over_budget = limits.paused_blocks is not None and kept > limits.paused_blocks
        stuck = bool(paused) and not decoding and not prefilling
        if not over_budget and not stuck:
            return _Growth(prefilling, decoding, paused, evicted, failed, left)
        youngest = paused[-1]
        growing.remove(youngest)
        evicted.append(youngest)
        free_blocks += len(youngest.block_table)


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


def _plan_admissions(
    waiting: Iterable[Request], limits: Limits, room: Room
) -> tuple[list[Admission], Refusal | None, list[Failure]]:
    """Admit waiting requests in order until one has to wait.

    A request fails here if its last token outgrew the pool just before a suspend sent it back to wait.
    """
    admissions: list[Admission] = []
    failed: list[Failure] = []
    for request in waiting:
        error = _check_fits_pool(request, limits)
        if error is not None:
            failed.append((request, error))
            continue
        decision = plan_admission(request, limits, room)
        if isinstance(decision, Refusal):
            return admissions, decision, failed
        admissions.append(decision)
        room = Room(room.blocks - decision.blocks, room.requests - 1, room.tokens - decision.chunk.length)
    return admissions, None, failed


def plan_admission(request: Request, limits: Limits, room: Room) -> Admission | Refusal:
    """Whether `request` can enter the batch now, and with which first chunk.

    It takes the blocks of all its tokens at once, so that a prefill that has begun never waits for memory. What was
    generated before an eviction is prefilled again; if that does not fit a step, it is cut even where chunked prefill
    is off, because the request was already served so far.
    """
    length = len(request.tokens)
    if room.requests < 1:
        return Refusal(request, "requests", 1, 0)
    blocks = limits.blocks_for(length)
    if blocks > room.blocks:
        return Refusal(request, "blocks", blocks, room.blocks)
    may_cut = limits.chunked_prefill or length > limits.max_tokens
    needed_tokens = 1 if may_cut else length
    if needed_tokens > room.tokens:
        return Refusal(request, "tokens", needed_tokens, room.tokens)
    return Admission(request, blocks, Chunk(request, 0, min(length, room.tokens)))
