"""Prefix index of the replicas with one block size, from their events and from the requests in flight to them.

Each replica has its contents, as its events report them, in the bits of its index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.prefix_cache.matching import last_boundary, resume_position
from megatron_ext.routing.prompt import ROOT, ExtraKeys, Prompt, chained_keys, frozen_extras, packed

_FEW = 1024  # assignments that are kept without a look at what the replica holds
Hash = Hashable  # a replica's hash of a block: of an event a 64-bit integer, with the rank of its cache


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
        self.members = 0  # bits of its replicas
        self.with_states = 0  # of these, that resume only at snapshots

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

    def check(self) -> None:
        """Assert that every key has replicas of this index, and that snapshots are at the ends of stored blocks."""
        assert not self.with_states & ~self.members, "a replica that is not in this index"
        for holders in (self.stored, self.claimed, self.states):
            for there in holders.bits.values():
                assert there, "a key without replicas"
                assert not there & ~self.members, "an index entry of a replica that is not in it"
        for key, there in self.states.bits.items():
            assert not there & ~self.stored.bits.get(key, 0), "a snapshot outlives its block"


@dataclass
class InFlightRequest:
    """Request in flight to a replica.

    Attributes:
        replica: Name of the replica.
        claimed: Keys of the prompt's blocks, while they count as the replica's.
        to_compute: Prompt tokens to compute; 0 after the first output token.
        to_generate: Expected number of tokens still to generate.
        last: Key of the last block of which the prompt has more tokens; None without such a block.
    """

    replica: str
    claimed: Sequence[int]
    to_compute: int
    to_generate: int
    last: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens yet to be computed, of prompt and output."""
        return self.to_compute + self.to_generate


class Replica:
    """Contents of one replica, as its events report them, in the bits of its index.

    Args:
        name: Name of the replica.
        number: Number of the replica's bit.
        index: Index of the replicas with the same block size.
        has_states: Whether the replica resumes only at snapshots (a model with recurrent layers).
        slots: Number of requests that the replica runs at once.
        capacity: Number of tokens that the replica has room for; 0 if that is not known.

    Attributes:
        blocks: Keys of the blocks that the replica holds, by its hashes.
        states: Keys of the snapshots that the replica holds, by the hashes of the blocks at whose ends they are.
    """

    def __init__(
        self,
        name: str,
        number: int,
        index: PrefixIndex,
        *,
        has_states: bool,
        slots: int,
        capacity: int,
    ) -> None:
        self.name, self.number, self.bit = name, number, 1 << number
        self.index, self.has_states = index, has_states
        self.slots, self.capacity = slots, capacity
        self.others = 0  # tokens yet to be computed for requests of other routers
        self.other_requests = 0
        self.in_flight: set[Hashable] = set()  # requests
        self.assignments: dict[int, int] = {}  # key -> number of the last request with this block that was sent here
        self._max_assignments = _FEW
        self.blocks: dict[Hash, int] = {}
        self.states: dict[Hash, int] = {}
        index.members |= self.bit
        index.with_states |= self.bit if has_states else 0

    @property
    def pending(self) -> int:
        """Number of requests that have not ended, including requests from other routers."""
        return len(self.in_flight) + self.other_requests

    @property
    def held(self) -> int:
        """Number of tokens that the replica holds, by its events."""
        return len(self.blocks) * self.index.block_size

    def note_assignment(self, keys: Iterable[int], count: int) -> None:
        """Note the blocks of a request that was sent here, the `count`-th of all.

        Each time the table has doubled, blocks that the replica neither holds nor will hold are dropped from it.
        """
        self.assignments.update(dict.fromkeys(keys, count))
        if len(self.assignments) > self._max_assignments:
            has, bit = self.index.has, self.bit
            self.assignments = {key: last for key, last in self.assignments.items() if has(key, bit)}
            self._max_assignments = max(_FEW, 2 * len(self.assignments))

    def stored(
        self,
        hashes: Sequence[Hash],
        parent: Hash | None,
        tokens: Iterable[int],
        extras: ExtraKeys | None = None,
    ) -> None:
        """Handle `BlockStored`: the replica holds a run of blocks; a run after an unknown block is ignored.

        Args:
            hashes: The replica's hashes of the blocks, in order; some may be known already.
            parent: Hash of the block before the run; None at the start of a sequence.
            tokens: Token ids of all blocks.
            extras: Extra keys of the blocks besides their tokens, None for a block without: `[[salt], None, ...]`.

        Raises:
            ValueError: The number of tokens does not match the blocks, or a token id is invalid.
        """
        ids, size = packed(tokens), self.index.block_size
        if len(ids) != len(hashes) * size:
            raise ValueError(f"{len(hashes)} blocks of {size} tokens come with {len(ids)} token ids")
        before = ROOT if parent is None else self.blocks.get(parent)
        if before is None:
            return
        for one, key in zip(hashes, chained_keys(before, ids, size, frozen_extras(extras)), strict=True):
            if one in self.blocks:
                if self.blocks[one] == key:
                    continue
                self.removed([one])
            self.blocks[one] = key
            self.index.stored.add(self.bit, [key])

    def removed(self, hashes: Iterable[Hash]) -> None:
        """Handle `BlockRemoved`: blocks and the snapshots at their ends are gone; unknown hashes are ignored."""
        removed = [one for one in hashes if one in self.blocks]
        self.state_removed(removed)
        self.index.stored.discard(self.bit, [self.blocks.pop(one) for one in dict.fromkeys(removed)])

    def state_stored(self, hashes: Iterable[Hash]) -> None:
        """Handle `StateStored`: requests can resume from snapshots at the ends of these blocks; unknown are ignored."""
        new = {one: self.blocks[one] for one in hashes if one in self.blocks and one not in self.states}
        self.states.update(new)
        self.index.states.add(self.bit, new.values())

    def state_removed(self, hashes: Iterable[Hash]) -> None:
        """Handle `StateRemoved`: the snapshots at the ends of these blocks are gone."""
        removed = [one for one in dict.fromkeys(hashes) if one in self.states]
        self.index.states.discard(self.bit, [self.states.pop(one) for one in removed])

    def cleared(self) -> None:
        """Handle `AllBlocksCleared`: the replica's cache is empty."""
        self.state_removed(list(self.states))
        self.removed(list(self.blocks))

    def resumes_after(self, key: int) -> bool:
        """Return whether a request can resume after a block, by the replica's events alone."""
        here = self.index.stored.bits.get(key, 0)
        return bool(here & (self.index.states.bits.get(key, 0) if self.has_states else here) & self.bit)

    def check(self) -> None:
        """Assert that the index has the replica's blocks and snapshots, with the right number of occurrences."""
        assert self.index.stored.counts(self.bit) == Counter(self.blocks.values()), f"blocks of {self.name}"
        assert self.index.states.counts(self.bit) == Counter(self.states.values()), f"snapshots of {self.name}"
