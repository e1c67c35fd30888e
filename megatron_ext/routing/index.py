"""What replicas with blocks of one size have of a prompt: from their events, and from what is in flight to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_ext.prefix_cache.matching import last_boundary, resume_position
from megatron_ext.routing.holders import Holders
from megatron_ext.routing.prompt import Prompt


class PrefixIndex:
    """See the module.

    Replicas say a block after those before it and take it back before them, and a claim covers a prompt from its start;
    so who has a block has those before it, and the end of a match is found by doubling and halving. Where a replica
    does otherwise, how much it skips may be misjudged until it has taken back the rest.

    Args:
        block_size: Tokens.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.stored = Holders()  # blocks, from events
        self.claimed = Holders()  # blocks of prompts in flight
        self.states = Holders()  # visible snapshots, by the block that they stand at the end of
        self.with_states = 0  # bits of replicas that can resume at snapshots only

    def levels(self, prompt: Prompt, replicas: int) -> Iterator[tuple[int, int]]:
        """(tokens that are skipped, bits of replicas that skip as many), the most first; who skips none is left out.

        Args:
            prompt: Of at least one token.
            replicas: Bits of those that are asked about.
        """
        keys, length, size = prompt.keys(self.block_size), len(prompt), self.block_size
        plain, resuming = replicas & ~self.with_states, replicas & self.with_states
        for depth, bits in self._matched(keys, plain):
            yield resume_position(length, depth * size), bits
        for depth, bits in self._resumable(keys, last_boundary(length, size) // size, resuming):
            yield depth * size, bits

    def _having(self, key: int) -> int:
        return self.stored.bits.get(key, 0) | self.claimed.bits.get(key, 0)

    def _matched(self, keys: Sequence[int], replicas: int) -> Iterator[tuple[int, int]]:
        """(blocks, bits of those whose matched run has as many), the longest first."""
        end = len(keys)
        while replicas and (depth := self._deepest(keys, end, replicas)):
            bits = self._having(keys[depth - 1]) & replicas
            yield depth, bits
            replicas, end = replicas & ~bits, depth - 1

    def _deepest(self, keys: Sequence[int], end: int, replicas: int) -> int:
        """Blocks up to the last one of the first `end` that any of `replicas` has."""
        stored, claimed = self.stored.bits.get, self.claimed.bits.get
        low, high = 0, 1
        while high <= end and (stored(keys[high - 1], 0) | claimed(keys[high - 1], 0)) & replicas:
            low, high = high, 2 * high
        high = min(high, end + 1)
        while high - low > 1:
            middle = (low + high) // 2
            key = keys[middle - 1]
            if (stored(key, 0) | claimed(key, 0)) & replicas:
                low = middle
            else:
                high = middle
        return low

    def _resumable(self, keys: Sequence[int], end: int, replicas: int) -> Iterator[tuple[int, int]]:
        """(blocks, bits of those that can resume behind as many of the first `end`), the most first.

        A snapshot can be there without one before it, so boundaries are looked at one by one, from the end of the
        longest match. Where a prompt is in flight every boundary counts: it leaves a state where another parts from it.
        """
        end = self._deepest(keys, end, replicas) if replicas else 0
        states, claimed = self.states.bits, self.claimed.bits
        for depth in range(end, 0, -1):
            key = keys[depth - 1]
            bits = (states.get(key, 0) | claimed.get(key, 0)) & replicas
            if bits:
                yield depth, bits
                replicas &= ~bits
                if not replicas:
                    return

    def having_first(self, prompt: Prompt, replicas: int) -> int:
        """Bits of those among `replicas` that have the prompt's first block."""
        keys = prompt.keys(self.block_size)
        return self._having(keys[0]) & replicas if keys else 0

    def skipped(self, prompt: Prompt, bit: int) -> int:
        """Tokens that the replica of `bit` would skip."""
        return next((tokens for tokens, _ in self.levels(prompt, bit)), 0)

    def having(self) -> int:
        """Bits of those who have anything; for tests, which look at all."""
        bits = self.with_states
        for holders in (self.stored, self.claimed, self.states):
            for there in holders.bits.values():
                bits |= there
        return bits

    def check(self) -> None:
        """Assert that nobody's place is kept for nothing, and that snapshots stand at the ends of blocks."""
        for holders in (self.stored, self.claimed, self.states):
            assert all(holders.bits.values()), "a key of nobody"
        for key, there in self.states.bits.items():
            assert not there & ~self.stored.bits.get(key, 0), "a snapshot outlives its block"
