"""Prefix index of the replicas with one block size, from their events and from the requests in flight to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.matching import last_boundary, resume_position
from megatron_ext.routing.prompt import Prompt


class Holders:
    """Sets of replicas by key, each set as the bits of one integer.

    A replica may have a key several times (several requests in flight share a prefix); it has the key until every
    occurrence is discarded.
    """

    def __init__(self) -> None:
        self.bits: dict[int, int] = {}  # key -> replicas, never 0; changed by `add` and `discard` only
        self._again: dict[int, dict[int, int]] = {}  # replica's bit -> key -> occurrences beyond the first, never 0

    def __len__(self) -> int:
        return len(self.bits)

    def add(self, bit: int, keys: Iterable[int]) -> None:
        """Add one occurrence of each key for the replica of `bit`."""
        bits = self.bits
        get = bits.get
        for key in keys:
            replicas = get(key)
            if replicas is None:
                bits[key] = bit  # shares the replica's integer, so that a key of one replica needs no new one
            elif replicas & bit:
                again = self._again.setdefault(bit, {})
                again[key] = again.get(key, 0) + 1
            else:
                bits[key] = replicas | bit

    def discard(self, bit: int, keys: Iterable[int]) -> None:
        """Remove one occurrence of each key for the replica of `bit`, which must have them."""
        if bit in self._again:
            keys = self._remove(bit, keys)
        bits = self.bits
        for key in keys:
            left = bits[key] ^ bit
            if left:
                bits[key] = left
            else:
                del bits[key]

    def _remove(self, bit: int, keys: Iterable[int]) -> list[int]:
        """Remove one occurrence of each key, and return the keys that have none left."""
        again, removed = self._again[bit], []
        for key in keys:
            more = again.pop(key, 0)
            if more == 0:
                removed.append(key)
            elif more > 1:
                again[key] = more - 1
        if not again:
            del self._again[bit]
        return removed

    def counts(self, bit: int) -> dict[int, int]:
        """Return the keys of the replica of `bit` with their numbers of occurrences; O(all keys), for tests."""
        again = self._again.get(bit, {})
        return {key: 1 + again.get(key, 0) for key, replicas in self.bits.items() if replicas & bit}


@dataclass(frozen=True)
class Match:
    """Cached part of a prompt.

    Attributes:
        share: Share of the prompt's complete blocks, above 0 and up to 1.
        key: Key of the last cached block.
        replicas: Bits of the replicas that have this block.
    """

    share: float
    key: int
    replicas: int


class PrefixIndex:
    """Index of the blocks and snapshots that replicas have.

    Replicas report a block after its parents and remove it before them, and a claim covers a prompt from its start. So
    a replica that has a block has its parents, and the end of a match is found by doubling and bisection. For a replica
    that reports in another order, the skipped tokens may be misjudged until it has removed the rest.

    Args:
        block_size: Tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.stored = Holders()  # blocks, from events
        self.claimed = Holders()  # blocks of prompts in flight
        self.states = Holders()  # visible snapshots, by the block at whose end they are
        self.with_states = 0  # bits of replicas that resume only at snapshots

    def levels(self, prompt: Prompt, replicas: int) -> Iterator[tuple[int, int]]:
        """Iterate over (skipped tokens, bits of the replicas that skip as many), the most first; 0 is left out.

        Args:
            prompt: Prompt of at least one token.
            replicas: Bits of the replicas to consider.
        """
        keys, length, size = prompt.keys(self.block_size), len(prompt), self.block_size
        plain, resuming = replicas & ~self.with_states, replicas & self.with_states
        for depth, bits in self._matched(keys, plain):
            yield resume_position(length, depth * size), bits
        for depth, bits in self._resumable(keys, min(len(keys), last_boundary(length, size) // size), resuming):
            yield depth * size, bits

    def longest(self, prompt: Prompt, replicas: int) -> Match | None:
        """Return the longest match, up to the last snapshot where replicas resume at these; None without any.

        Args:
            prompt: Prompt of at least one token.
            replicas: Bits of the replicas to consider.
        """
        keys, size = prompt.keys(self.block_size), self.block_size
        plain, resuming = replicas & ~self.with_states, replicas & self.with_states
        depth, bits = next(self._matched(keys, plain), (0, 0))
        end = min(len(keys), last_boundary(len(prompt), size) // size)
        resumed, others = next(self._resumable(keys, end, resuming), (0, 0))
        if resumed >= depth:
            depth, bits = resumed, others | (bits if resumed == depth else 0)
        return Match(depth / len(keys), keys[depth - 1], bits) if depth else None

    def first(self, prompt: Prompt, replicas: int) -> Match | None:
        """Return a match of the whole prompt by those among `replicas` that have its first block; None without any."""
        keys = prompt.keys(self.block_size)
        bits = self._having(keys[0]) & replicas if keys else 0
        return Match(1.0, keys[0], bits) if bits else None

    def _having(self, key: int) -> int:
        return self.stored.bits.get(key, 0) | self.claimed.bits.get(key, 0)

    def _matched(self, keys: Sequence[int], replicas: int) -> Iterator[tuple[int, int]]:
        """Iterate over (blocks, bits of the replicas whose matched run has as many), the longest first."""
        end = len(keys)
        while replicas and (depth := self._deepest(keys, end, replicas)):
            bits = self._having(keys[depth - 1]) & replicas
            yield depth, bits
            replicas, end = replicas & ~bits, depth - 1

    def _deepest(self, keys: Sequence[int], end: int, replicas: int) -> int:
        """Return the number of blocks, at most `end`, up to the last one that any of `replicas` has."""
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
        """Iterate over (blocks, bits of the replicas that can resume after as many of the first `end`), the most first.

        A snapshot may exist without earlier ones, so boundaries are tried one by one, from the end of the longest
        match. For a prompt in flight every boundary counts: it leaves a state where another prompt diverges from it.
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

    def has(self, key: int, bit: int) -> bool:
        """Return whether the replica of `bit` has a block, or will have it."""
        return bool(self._having(key) & bit)

    def check(self, replicas: int) -> None:
        """Assert that every key has some of these replicas, and that snapshots are at the ends of stored blocks."""
        assert not self.with_states & ~replicas, "a replica that is not in this index"
        for holders in (self.stored, self.claimed, self.states):
            for there in holders.bits.values():
                assert there, "a key without replicas"
                assert not there & ~replicas, "an index entry of a replica that is not in it"
        for key, there in self.states.bits.items():
            assert not there & ~self.stored.bits.get(key, 0), "a snapshot outlives its block"
