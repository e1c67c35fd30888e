"""Drafts between a scheduler's steps: proposals, reserved slots, acceptance and states to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.prefix_cache.snapshot_order import Rank
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.spec_decode.draft_counts import SpeculationUse
from megatron_ext.scheduling.spec_decode.verification import (
    NO_TOKENS,
    DraftSlots,
    TokensById,
    accepted_tokens,
    draft_states,
)
from megatron_ext.scheduling.step import ScheduledChunk


@dataclass(frozen=True)
class SpecDecodeResult:
    """Number of verified drafts of a request in one step, and number of accepted ones, from the first on."""

    request_id: int
    drafted: int
    accepted: int


class Drafts:
    """Part of the scheduler that handles drafts; called at each point of a step where drafts matter.

    Args:
        limits: Limits of the engine.
        cache: Prefix cache, in which some of the states become snapshots.
        counters: Counters of the scheduler.

    Attributes:
        proposals: Drafts for the next step.
        verified: Results of the last step's verification.
        unsettled: Requests with drafts in the step being committed, until `commit` is called for each.
        slots: Slots for the states after drafts.
        use: Counts of verified and accepted drafts.
    """

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache, counters: Counters) -> None:
        self._is_on = limits.max_drafts > 0
        self._block_size = limits.block_size
        self._cache = cache
        self._counters = counters
        self.proposals = NO_TOKENS
        self.verified: list[SpecDecodeResult] = []
        self.use = SpeculationUse([0] * limits.max_drafts, [0] * limits.max_drafts)
        self.unsettled: set[int] = set()
        self.slots = DraftSlots(
            0 if cache.states is None else limits.first_apart_slot(cache.states.total), limits.draft_states
        )

    def reserve(self, chunks: Sequence[Chunk]) -> None:
        """Reserve slots for the states after the tokens of the step's drafts.

        The state that a request continues from is copied to its running state slot before any slot is written, so its
        own slot is free by then.
        """
        if not self._is_on:
            return
        self.proposals = NO_TOKENS
        for chunk in chunks:
            self.release(chunk.request)
        for chunk in chunks:
            if chunk.drafts and self._cache.states is not None:
                chunk.request.draft_states = draft_states(chunk, self.slots, self._block_size)

    def release(self, request: Request) -> None:
        """Free the slots of the request's draft states."""
        if request.draft_states:
            self.slots.give([one.slot for one in request.draft_states])
            request.draft_states = ()

    def accept(
        self,
        requests: Sequence[Request],
        chunks: Sequence[ScheduledChunk],
        sampled: Mapping[int, int],
        target_tokens: TokensById,
    ) -> tuple[list[int], Mapping[int, int]]:
        """Append accepted drafts to their requests, as if each had come in a step of its own.

        Args:
            requests: Requests of the chunks.
            chunks: Chunks of the step.
            sampled: Request id -> token sampled after its last known one.
            target_tokens: Request id -> target tokens after its drafts, if it has drafts.

        Returns:
            End of each chunk after its accepted tokens, and the last token of each request that got any.
        """
        self.verified = []
        if not self._is_on:
            assert not target_tokens, "this engine verifies none"
            return [chunk.end for chunk in chunks], sampled
        ends, last = [chunk.end for chunk in chunks], dict(sampled)
        for i, (request, chunk) in enumerate(zip(requests, chunks, strict=True)):
            assert len(chunk.target_sampling) == len(target_tokens.get(chunk.request_id, ())), (
                "one target token after each draft"
            )
            if not chunk.target_sampling:
                continue
            drawn = [sampled[chunk.request_id], *target_tokens[chunk.request_id]]
            accepted = accepted_tokens(request, chunk.drafts, drawn)
            for token in accepted[:-1]:
                request.append(token)
            ends[i], last[chunk.request_id] = chunk.start + len(accepted), accepted[-1]
            self._count(request, len(chunk.target_sampling), len(accepted) - 1)
        return ends, last

    def _count(self, request: Request, drafted: int, accepted: int) -> None:
        for counts in (request.timeline, self._counters):
            counts.drafted += drafted
            counts.accepted += accepted
        self.use.note(drafted, accepted)
        self.verified.append(SpecDecodeResult(request.request_id, drafted, accepted))
        self.unsettled.add(request.request_id)

    def commit(self, request: Request) -> list[BlockHash]:
        """Commit a request after its last accepted token, once its blocks are published: keep states, free the rest.

        The state after the last token is kept to continue from, and those at the boundaries that were passed become
        snapshots as in decode, without a copy. All other slots are freed, and so are blocks without accepted tokens.

        Returns:
            Block hashes of the snapshots that can be found now.
        """
        self.unsettled.remove(request.request_id)
        self._trim(request)
        return self._keep_states(request)

    def _trim(self, request: Request) -> None:
        count = -(-request.computed_end // self._block_size)
        kept, surplus = request.block_table[:count], request.block_table[count:]
        if surplus:
            request.block_table = kept
            self._cache.release(surplus)

    def _keep_states(self, request: Request) -> list[BlockHash]:
        kept: list[Snapshot] = []
        spare: list[SlotId] = []
        shown: list[BlockHash] = []
        for state in request.draft_states:
            if DraftSlots.is_name(state.block_hash):
                is_next = state.position == request.computed_end
                kept += [state] if is_next else []
                spare += [] if is_next else [state.slot]
            else:
                slot = self._become_snapshot(request, state) if state.position <= request.computed_end else None
                shown += [] if slot is None else [state.block_hash]
                spare.append(state.slot if slot is None else slot)
        self.slots.give(spare)
        request.draft_states = tuple(kept)
        if kept:
            (state,) = kept
            request.restore = Restore(state.block_hash, state.slot)
        return shown

    def _become_snapshot(self, request: Request, state: Snapshot) -> SlotId | None:
        """Publish the state as a snapshot; return the slot given in exchange, or None if it gets none."""
        states = self._cache.states
        assert states is not None, "states of a model without recurrent layers"
        if request.cache_epoch != self._cache.epoch:
            return None
        assert request.block_hashes[state.position // self._block_size - 1] == state.block_hash, (
            "the drafts did not come"
        )
        if states.reserve(state.block_hash, Rank.OPTIONAL, instead_of=request.snapshot_plan.decode) is None:
            return None
        request.snapshot_plan.decode = state.block_hash
        slot = states.exchange(state.block_hash, state.slot)
        states.commit(state.block_hash)
        return slot

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that every slot is reserved once or free, and that its request continues from it (between steps)."""
        owned = [(request, state) for request in requests for state in request.draft_states]
        index = () if self._cache.states is None else self._cache.states.slots
        self.slots.check([state.slot for _, state in owned], index)
        for request, state in owned:
            assert state.position == request.computed_end, f"request {request.request_id} does not go on from its state"
            assert request.restore == Restore(state.block_hash, state.slot), "another state would be restored"
