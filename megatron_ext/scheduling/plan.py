"""Values of scheduling: limits, budget, admissions, deferrals and the step plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.config.costs import NEUTRAL_COSTS, EntryCosts
from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.prefix_cache.slab_layout import SlabLayout
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.placement import AS_MANY_AS_FREE, OpportunisticRules

_MODE = "--inference-dynamic-batching-prefix-caching-mamba-mode align"
_MAX_TOKENS = "--inference-dynamic-batching-max-tokens"
_MAX_REQUESTS = "--inference-dynamic-batching-max-requests"


@dataclass(frozen=True)
class SchedulerLimits:
    """Scheduler limits: constants that the engine was built for."""

    block_size: int  # tokens
    total_blocks: int
    paused_blocks: int | None  # blocks that paused requests may keep; None is no limit
    max_requests: int
    max_tokens: int  # per step
    max_sequence_length: int  # of the model or the settings; see `max_model_len`
    chunked_prefill: bool
    aligned_chunks: bool = False  # `align` mode: snapshots only at ends of prefill chunks; see `cut_aligned`
    max_prefills: int = 0  # requests that prefill in a step; 0 is no limit
    enough_prefill_tokens: int | None = None  # a step with this many begins no other prefill; None: no limit
    prefill_tokens_beside_decodes: int | None = None  # of a step in which requests decode; None: no limit
    decode_share: float = 0.0  # of their own rate, which decoding requests keep beside prefills; see `DecodeShare`
    explains: bool = False  # explain cache use of each request; keeps the token ids of cached blocks
    audit_interval: int = 0  # hits from one audit to the next; 0: none
    keeps_log_probs: bool = False  # of prompts, with their cached blocks
    keeps_routing: bool = False  # routing indices are recorded, and kept with cached blocks
    is_durable: bool = False  # cached blocks outlive the process, with their token ids
    costs: EntryCosts = NEUTRAL_COSTS  # of cached tokens, for cost-aware policies; equal on all ranks
    opportunistic: OpportunisticRules = AS_MANY_AS_FREE  # opportunistic checkpoints of prefills, in free slots
    max_drafts: int = 0  # per request and step; 0 disables verification
    draft_states: int = 0  # slots for the states after drafts, in models with recurrent layers
    async_states: int = 0  # slots for snapshots of steps launched ahead; one slot for padding precedes them
    slabs: SlabLayout | None = None  # arena that blocks and snapshots share; None: a fixed number of each
    overtake_tokens: int | None = None  # budget of each request under `lpm`, see `WaitingOrder`; None: `fcfs`

    @property
    def keeps_tokens(self) -> bool:
        """True if the token ids of cached blocks are kept."""
        return self.explains or self.is_durable

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.total_blocks * self.block_size

    @property
    def max_model_len(self) -> int:
        """Maximum length of a sequence, prompt and output together, that the model, the settings and the pool allow."""
        return min(self.max_sequence_length, self.pool_tokens)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def missing_blocks(self, request: Request, end: int) -> int:
        """Return the number of blocks that the first `end` tokens of a request need in addition to its block table."""
        return max(0, self.blocks_for(end) - len(request.block_table))

    def first_apart_slot(self, slots: int) -> int:
        """Return the first slot after the `slots` slots of the snapshot index."""
        return slots if self.slabs is None else self.slabs.first_apart_slot

    def prefill_limit(self, decodes: int, *, is_held: bool) -> int | None:
        """Return the maximum prefill tokens of a step (SC-4); None if only `max_tokens` limits them.

        Args:
            decodes: Number of requests that decode in the step.
            is_held: Whether they have the step to themselves.
        """
        if not decodes:
            return None
        if is_held:
            return 0
        return self.prefill_tokens_beside_decodes if self.chunked_prefill else None

    def may_prefill(self, requests: int, tokens: int) -> bool:
        """Return whether another request may prefill in a step that already prefills this many (SC-3)."""
        if self.max_prefills and requests >= self.max_prefills:
            return False
        return self.enough_prefill_tokens is None or tokens < self.enough_prefill_tokens


@dataclass(frozen=True)
class StepBudget:
    """Budget that is left at some point of planning a step."""

    blocks: int  # free and evictable
    requests: int
    tokens: int
    slots: int = 0  # for snapshots that followers wait for
    prefills: int = 0  # used: requests that prefill in this step, and their tokens
    prefill_tokens: int = 0
    prefill_limit: int | None = None  # maximum of their tokens; None: only `tokens` limits them
    pinned: frozenset[BlockId] = frozenset()  # evictable blocks that the plan uses, no longer counted

    @property
    def has_prefill_room(self) -> bool:
        """True if the prefill tokens of the step have not reached their limit."""
        return self.prefill_limit is None or self.prefill_tokens < self.prefill_limit

    @property
    def chunk_tokens(self) -> int:
        """Maximum tokens of the next prefill's chunk; if it has no room in this step, as without a limit."""
        if self.prefill_limit is None or not self.has_prefill_room:
            return self.tokens
        return min(self.tokens, self.prefill_limit - self.prefill_tokens)


def work_from(request: Request, start: int) -> int:
    """Return the tokens that a request computes from `start` until it ends: of its prefill, and to be generated."""
    return len(request.tokens) - start + request.max_generated - request.generated_count


@dataclass(frozen=True)
class Admission:
    """Admission of a waiting request into the batch: all its blocks are allocated now, and its first chunk is computed.

    A fork is admitted with an empty chunk at the end of its prompt, which has a source (see `forks`). It matches no
    cached block: it shares the full blocks of its source, and allocates one for a copy of the partial block.

    Args:
        matched: Cached blocks that the request shares, from its start.
        new_blocks: Blocks to allocate in addition.
        chunk: First chunk; starts at the resume position.
        restore: Snapshot of the states at the resume position; None if there is no snapshot to restore.
        opportunistic: Positions of opportunistic checkpoints, in order of priority.
        usable_blocks: Blocks among `matched` with all data that it needs (see `kept_data`); of a fork, its full blocks.
    """

    request: Request
    matched: tuple[BlockId, ...]
    new_blocks: int
    chunk: Chunk
    restore: Restore | None = None
    opportunistic: tuple[int, ...] = ()
    usable_blocks: int = field(kw_only=True)

    @property
    def work(self) -> int:
        """Tokens that the request computes until it ends: its remaining prefill, and all that it may generate."""
        return work_from(self.request, self.chunk.start)


@dataclass(frozen=True)
class SnapshotRequest:
    """Snapshot that this step or a later one is to take: of a prefill, of a decode, or for a follower.

    Args:
        request: Request that computes the states.
        position: Tokens before the snapshot; a block boundary.
        block_hash: Hash of the block that ends there.
        rank: Rank of the snapshot; optional if taken in decode (see `StateIndex`).
        instead_of: Snapshot that the request took in decode before, to be replaced.
    """

    request: Request
    position: int
    block_hash: BlockHash
    rank: Rank = Rank.ORDINARY
    instead_of: BlockHash | None = None


@dataclass(frozen=True)
class Deferral:
    """Deferral of a waiting request that cannot enter the batch in this step, but can in a later one.

    Requests that can never be served are rejected on arrival; see `reason_to_refuse`.
    """

    request: Request
    resource: str  # "blocks", "requests", "tokens", "prefills", "disk", "mask"; "prefix" or "prompt": see `wait_for`
    needed: int
    available: int
    wait_for: int | None = None  # id of the request that computes its next block, or its prompt
    snapshot: SnapshotRequest | None = None  # snapshot for it by the leader (KV-6); None without recurrent layers
    until: int | None = None  # tokens, a block boundary: the prefix is there once the leader has computed them
    load: int | None = None  # number of the load from disk that it waits for

    @property
    def lacks_room(self) -> bool:
        """True if the request waits for its turn, rather than for another request, the disk or a mask."""
        return self.wait_for is None and self.load is None and self.resource != "mask"


@dataclass(frozen=True)
class StepPlan:
    """Plan of a step. A request is in at most one of the tuples of moves; chunks are decodes, prefills, then forks."""

    preemptions: tuple[Request, ...]
    pauses: tuple[Request, ...]
    resumes: tuple[Request, ...]
    admissions: tuple[Admission, ...]
    chunks: tuple[Chunk, ...]
    snapshots: tuple[SnapshotRequest, ...]  # in the order in which slots are reserved; see `plan_snapshots`
    deferrals: tuple[Deferral, ...]  # awake ones that wait for something other than room, then the first without room

    @property
    def only_continues(self) -> bool:
        """True if requests of the batch go on, and neither they nor waiting ones change their place in any queue."""
        is_moving = self.preemptions or self.pauses or self.resumes or self.admissions
        return not is_moving and all(one.wait_for is None for one in self.deferrals)


def check_aligned(limits: SchedulerLimits) -> None:
    """Check that prefill chunks can end on the block grid (LA-3).

    Raises:
        ConfigError: Prefill chunks cannot end on the block grid.
    """
    if not limits.chunked_prefill:
        raise ConfigError(
            f"{_MODE} splits prompts into chunks, which --no-enable-chunked-prefill forbids; drop one of them"
        )
    if limits.max_tokens < limits.block_size:
        raise ConfigError(
            f"{_MODE} computes a block of {limits.block_size} tokens in a step; {_MAX_TOKENS} {limits.max_tokens} "
            f"must be at least {limits.block_size}"
        )


def describe_tight_budget(limits: SchedulerLimits) -> str | None:
    """Describe a token budget that may not fit a block and decodes, its cost and a remedy (LA-1); None if it does."""
    enough = limits.block_size + limits.max_requests
    if limits.max_tokens >= enough:
        return None
    return (
        f"{_MODE}: {_MAX_TOKENS} {limits.max_tokens} is less than a block of {limits.block_size} tokens and "
        f"{_MAX_REQUESTS} {limits.max_requests} together: beside decodes prefill chunks may end inside a block, "
        f"and prompts take more steps; give {enough}"
    )
