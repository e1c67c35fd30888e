"""What a step may use and what it does, as values: limits, budget, admissions, deferrals, the plan."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.costs import NEUTRAL_COSTS, EntryCosts
from megatron_ext.errors import CapacityError
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.placement import AS_MANY_AS_FREE, OpportunisticRules


@dataclass(frozen=True)
class SchedulerLimits:
    """What the engine was built for; constant."""

    block_size: int  # tokens
    total_blocks: int
    paused_blocks: int | None  # blocks that paused requests may keep; None is no limit
    max_requests: int
    max_tokens: int  # a step
    max_sequence_length: int
    chunked_prefill: bool
    aligned_chunks: bool = False  # snapshots are kept at ends of prefill chunks only; see `snapshots.cut_aligned`
    max_prefills: int = 0  # requests that prefill in a step; 0 is no limit
    enough_prefill_tokens: int | None = None  # a step with so many begins no other prefill; None: as many as fit
    explains: bool = False  # each request is told why it skipped no more; token ids of cached blocks are kept for it
    costs: EntryCosts = NEUTRAL_COSTS  # of cached tokens, for policies that weigh them; the same on all ranks
    opportunistic: OpportunisticRules = AS_MANY_AS_FREE  # states that prefills leave in slots that are free anyway
    max_drafts: int = 0  # of a request in a step; 0 verifies none
    draft_states: int = 0  # slots for the states behind drafts, of models with recurrent layers
    async_states: int = 0  # slots for snapshots of steps launched ahead; there is one for padding before them

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def may_prefill(self, requests: int, tokens: int) -> bool:
        """Whether one more may prefill in a step in which so many do, so many tokens together (SC-3)."""
        if self.max_prefills and requests >= self.max_prefills:
            return False
        return self.enough_prefill_tokens is None or tokens < self.enough_prefill_tokens


@dataclass(frozen=True)
class StepBudget:
    """What is left at some point of planning a step."""

    blocks: int  # free ones, evictable ones, and what those who leave in this step release
    requests: int
    tokens: int
    slots: int = 0  # for snapshots that followers wait for
    prefills: int = 0  # taken: requests that prefill in this step, and their tokens
    prefill_tokens: int = 0
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
        opportunistic: Positions of snapshots that nobody asked for; the first goes first.
    """

    request: Request
    matched: tuple[BlockId, ...]
    new_blocks: int
    chunk: Chunk
    restore: Restore | None = None
    opportunistic: tuple[int, ...] = ()


@dataclass(frozen=True)
class SnapshotRequest:
    """A snapshot that a step, or one that comes after it, is to take: of a prefill, of a decode, or for a follower.

    Args:
        request: Computes the states.
        position: Tokens before them; a block boundary.
        block hash: Of the block that ends there.
        rank: Optional if taken in decode; see `StateIndex`.
        instead_of: The one that the request took in decode before.
    """

    request: Request
    position: int
    block_hash: BlockHash
    rank: Rank = Rank.ORDINARY
    instead_of: BlockHash | None = None

    @property
    def is_optional(self) -> bool:
        """Whether it is one of decode."""
        return self.rank is Rank.OPTIONAL


@dataclass(frozen=True)
class Deferral:
    """A waiting request does not enter the batch in this step, but can in a later one.

    What can never be served is turned away before it waits (see `check_admissible`) or fails (see `StepPlan.failures`).
    """

    request: Request
    resource: str  # "blocks", "requests", "tokens", "prefills", or "prefix": another one is computing its next block
    needed: int
    available: int
    wait_for: int | None = None  # the request id of that leader
    snapshot: SnapshotRequest | None = None  # what the leader is to leave for it (KV-6); None without recurrent layers
    until: int | None = None  # tokens, a block boundary: what it waits for is there when the leader has computed them


Failure = tuple[Request, CapacityError]


@dataclass(frozen=True)
class StepPlan:
    """What a step does. Nobody is in two of the tuples of moves; chunks are decodes first, then prefills."""

    preemptions: tuple[Request, ...]
    pauses: tuple[Request, ...]
    resumes: tuple[Request, ...]
    failures: tuple[Failure, ...]
    admissions: tuple[Admission, ...]
    chunks: tuple[Chunk, ...]
    snapshots: tuple[SnapshotRequest, ...]  # in the order in which slots are given out; see `plan_snapshots`
    deferrals: tuple[Deferral, ...]  # awake followers of other requests, and at last whoever must wait for room

    @property
    def deferral(self) -> Deferral | None:
        """Why the first request that must wait for room has to; None if nobody has to."""
        return next((deferral for deferral in self.deferrals if deferral.wait_for is None), None)
