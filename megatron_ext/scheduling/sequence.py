"""Sequence: the tokens of a request, how far they are computed, and the blocks and slots that they own.

Everything is counted in tokens, in half-open intervals over prompt and generation together:

    0                    prompt_length            len(tokens)
    |------ prompt ------|------ generated -------|
    |--- shared ---|                                          KV in blocks that others may use, never written
    |------ computed ------|-- the step's chunk --|           KV in the block table, states in the running state slot
    0              shared_end
                   computed_end == chunk.start    chunk.end

A sequence whose scheduled chunk ends at `len(tokens)` gets a new token from that step. `shared_end` may lie beyond
`computed_end`: the last token is computed even where its block is shared, and so are the tokens after the last
snapshot.
"""

from __future__ import annotations

from collections import abc

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash, HashChain, packed_tokens
from megatron_ext.prefix_cache.matching import Restore
from megatron_ext.scheduling.accounting import PrefillLedger
from megatron_ext.scheduling.request_rng import RequestRng
from megatron_ext.scheduling.running_slots import RunningSlot
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot, SnapshotPlan

Masks = tuple[bytes, ...]  # a bit for each token id, the lowest first; see `Sequence`


class Sequence:
    """Tokens of a request with their blocks and slots; only the scheduler writes it.

    Args:
        prompt_tokens: Tokens of the prompt.
        seed: Seed of the numbers that tokens are sampled with.
        generated_tokens: Tokens that an earlier request has generated.

    Attributes:
        tokens: Tokens of prompt and generation, packed for hashing.
        prompt_length: Tokens of the prompt as it was submitted.
        computed_end: Position below which tokens are computed or skipped (see the module, also for `shared_end`).
        published_blocks: Blocks of the block table that are published, from its start.
        chain: Chain of block hashes; None for a sequence that neither reads nor writes the cache.
        cache_epoch: Epoch of the cache when the request was admitted.
        block_table: Blocks owned, in order; replaced when that changes, so that a step's message keeps its version.
        running_slot: Running state slot; None while the request waits.
        restore: Snapshot to copy into the running state slot before the first chunk.
        snapshots: Snapshots with reserved slots that are not taken yet.
        snapshot_plan: Planned snapshots that do not follow from its position alone.
        draft_states: Slots of the states after its tokens while drafts are verified; then the one to continue from,
            unless that is the running state (`restore` says so, too).
        ledger: Account of prompt tokens.
        rng: Numbers that tokens are sampled with.
        masks: Token masks of a structured output: one bit per token id allowed next, then the same after each proposed
            draft; empty until they are known.
    """

    def __init__(
        self, prompt_tokens: abc.Sequence[int], seed: int | str, generated_tokens: abc.Sequence[int] = ()
    ) -> None:
        self.tokens = packed_tokens(prompt_tokens)
        self.prompt_length = len(self.tokens)
        self.tokens.extend(generated_tokens)
        self.computed_end = 0
        self.shared_end = 0
        self.published_blocks = 0
        self.chain: HashChain | None = None
        self.cache_epoch: int | None = None
        self.block_table: tuple[BlockId, ...] = ()
        self.running_slot: RunningSlot | None = None
        self.restore: Restore | None = None
        self.snapshots: list[Snapshot] = []
        self.snapshot_plan = SnapshotPlan()
        self.draft_states: tuple[Snapshot, ...] = ()
        self.ledger = PrefillLedger(self.prompt_length, len(self.tokens))
        self.rng = RequestRng(seed)
        self.rng.skip(len(generated_tokens))
        self.masks: Masks = ()

    @property
    def generated_count(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def is_decoding(self) -> bool:
        """True if only the last token, a generated one, is left to compute."""
        return self.prompt_length <= self.computed_end == len(self.tokens) - 1

    @property
    def block_hashes(self) -> abc.Sequence[BlockHash]:
        """Block hashes of the complete blocks of `tokens`; empty for a sequence that does not use the cache."""
        return () if self.chain is None else self.chain.extend(self.tokens)

    @property
    def unhashed_tokens(self) -> int:
        """Tokens in complete blocks that are not hashed yet."""
        return 0 if self.chain is None else self.chain.unhashed(len(self.tokens))

    def hash_ahead(self, max_tokens: int) -> None:
        """Hash the next complete blocks: at most `max_tokens` tokens, but at least one block."""
        if self.chain is not None:
            self.chain.extend_by(self.tokens, max_tokens)

    def advance(self, end: int) -> int:
        """Mark the tokens up to `end` as computed.

        Returns:
            Number of prefill tokens among them.
        """
        prefilled = self.ledger.compute(self.computed_end, end)
        self.computed_end = end
        self.restore = None
        return prefilled

    def append(self, token: int) -> None:
        """Append a generated token."""
        self.rng.advance()
        self.masks = ()
        self.tokens.append(token)

    def extend(self, tokens: abc.Sequence[int]) -> None:
        """Append generated tokens."""
        self.rng.advance(len(tokens))
        self.masks = ()
        self.tokens.extend(tokens)

    def cut(self, count: int) -> None:
        """Drop the last `count` tokens of a sequence that has ended and owns nothing."""
        del self.tokens[len(self.tokens) - count :]

    def reset(self) -> tuple[abc.Sequence[BlockId], list[Snapshot], RunningSlot | None]:
        """Reset the sequence to uncomputed and give up all that it owns.

        Returns:
            Blocks, reserved snapshots and running state slot that it owned, for return to their pools.
        """
        owned = self.block_table, self.snapshots, self.running_slot
        self.block_table, self.snapshots, self.running_slot, self.restore = (), [], None, None
        self.snapshot_plan.opportunistic, self.snapshot_plan.end_on_disk = (), 0
        self.draft_states = ()
        self.computed_end = self.shared_end = self.published_blocks = 0
        return owned
