"""The tokens of a request, how far they are computed, and what they own.

Everything is counted in tokens, in half-open intervals over prompt and generation together:

    0                    prompt_length            len(tokens)
    |------ prompt ------|------ generated -------|
    |--- shared ---|                                          KV in blocks that others may use, never written
    |------ computed ------|-- the step's chunk --|           KV in the block table, states in the running state slot
    0              shared_end
                   computed_end == chunk.start    chunk.end

A sequence whose scheduled chunk ends at `len(tokens)` gets a new token from that step. `shared_end` may lie beyond
`computed_end`: the last token is computed even where its block is shared, and so is what lies behind the last snapshot.
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
    """Written by the scheduler, and by nobody else.

    Args:
        prompt_tokens: Its first tokens.
        seed: Of the numbers that its tokens are drawn with.

    Attributes:
        tokens: Of prompt and generation.
        packed: The same, as they are hashed.
        computed_end: See the module, as `shared_end`.
        published_blocks: Of the block table, from its start.
        chain: Of the block hashes of its blocks; None for one that neither reads nor writes the cache.
        cache_epoch: Of the cache when it was admitted.
        block_table: What it owns, in order; replaced when that changes, so that a step's message keeps it.
        running_slot: Where its recurrent states are; None while it waits.
        restore: What to copy into the running state slot before the first chunk.
        snapshots: Slots are reserved for them; none is taken yet.
        trail: Which snapshots it leaves on its way, beside those that follow from where it stands.
        draft_states: While drafts are verified, where the states behind its tokens go; then the one that it goes on
            from, unless that is the live one (`restore` says so, too).
        ledger: Its account of prompt tokens.
        draws: The numbers that its tokens are drawn with.
        masks: Of a structured output: a bit for each token that may come next, then the same after each of the drafts
            that are proposed; empty until they are known.
    """

    def __init__(self, prompt_tokens: abc.Sequence[int], seed: int | str) -> None:
        self.tokens = list(prompt_tokens)
        self.packed = packed_tokens(prompt_tokens)
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
        self.ledger = PrefillLedger(len(prompt_tokens))
        self.rng = RequestRng(seed)
        self.masks: Masks = ()

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt as it was submitted."""
        return self.ledger.prompt_length

    @property
    def generated_count(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token, a generated one, is left to compute."""
        return self.prompt_length <= self.computed_end == len(self.tokens) - 1

    @property
    def block_hashes(self) -> abc.Sequence[BlockHash]:
        """Block hashes of the complete blocks of `tokens`; none for a sequence that stays away from the cache."""
        return () if self.chain is None else self.chain.extend(self.packed)

    @property
    def unhashed_tokens(self) -> int:
        """Tokens in complete blocks whose block hashes are yet to be made."""
        return 0 if self.chain is None else self.chain.unhashed(len(self.tokens))

    def hash_ahead(self, most: int) -> None:
        """Make the block hashes of the next complete blocks: of at most so many tokens, but of a block at least."""
        if self.chain is not None:
            self.chain.extend_by(self.packed, most)

    def advance(self, end: int) -> int:
        """The tokens up to `end` have been computed.

        Returns:
            How many of them are prefill.
        """
        prefilled = self.ledger.compute(self.computed_end, end)
        self.computed_end = end
        self.restore = None
        return prefilled

    def append(self, token: int) -> None:
        """A token was generated."""
        self.rng.advance()
        self.masks = ()
        self.tokens.append(token)
        self.packed.append(token)

    def cut(self, count: int) -> None:
        """The last `count` tokens did not come; it has ended, and owns nothing."""
        del self.tokens[len(self.tokens) - count :], self.packed[len(self.packed) - count :]

    def lose_all(self) -> tuple[abc.Sequence[BlockId], list[Snapshot], RunningSlot | None]:
        """Nothing of it is computed any more.

        Returns:
            What it owned, for those who have lent it: blocks, reserved snapshots, running state slot.
        """
        owned = self.block_table, self.snapshots, self.running_slot
        self.block_table, self.snapshots, self.running_slot, self.restore = (), [], None, None
        self.snapshot_plan.opportunistic = ()
        self.draft_states = ()
        self.computed_end = self.shared_end = self.published_blocks = 0
        return owned
