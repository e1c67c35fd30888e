"""State of one replica in the router, and the requests in flight to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from megatron_ext.routing.index import PrefixIndex
from megatron_ext.routing.prompt import ROOT, ExtraKeys, chained_keys, frozen_extras, packed

_FEW = 1024  # assignments that are kept without a look at what the replica holds
Hash = Hashable  # a replica's hash of a block: of an event a 64-bit integer, with the rank of its cache


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
        if has_states:
            index.with_states |= self.bit

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
    ) -> bool:
        """Handle `BlockStored`: the replica holds a run of blocks.

        Args:
            hashes: The replica's hashes of the blocks, in order; some may be known already.
            parent: Hash of the block before the run; None at the start of a sequence.
            tokens: Token ids of all blocks.
            extras: Extra keys of the blocks besides their tokens, None for a block without: `[[salt], None, ...]`.

        Returns:
            Whether the parent is known. If not, events were lost, and the run is ignored.

        Raises:
            ValueError: The number of tokens does not match the blocks, or a token id is invalid.
        """
        ids, size = packed(tokens), self.index.block_size
        if len(ids) != len(hashes) * size:
            raise ValueError(f"{len(hashes)} blocks of {size} tokens come with {len(ids)} token ids")
        before = ROOT if parent is None else self.blocks.get(parent)
        if before is None:
            return False
        for one, key in zip(hashes, chained_keys(before, ids, size, frozen_extras(extras)), strict=True):
            if one in self.blocks:
                if self.blocks[one] == key:
                    continue
                self.removed([one])
            self.blocks[one] = key
            self.index.stored.add(self.bit, [key])
        return True

    def removed(self, hashes: Iterable[Hash]) -> None:
        """Handle `BlockRemoved`: blocks and the snapshots at their ends are gone; unknown hashes are ignored."""
        removed = [one for one in hashes if one in self.blocks]
        self.state_removed(removed)
        self.index.stored.discard(self.bit, [self.blocks.pop(one) for one in dict.fromkeys(removed)])

    def state_stored(self, hashes: Iterable[Hash]) -> bool:
        """Handle `StateStored`: requests can resume from snapshots at the ends of these blocks.

        Returns:
            Whether all of these blocks are known; see `stored`.
        """
        new = [one for one in dict.fromkeys(hashes) if one not in self.states]
        known = {one: self.blocks[one] for one in new if one in self.blocks}
        self.states.update(known)
        self.index.states.add(self.bit, known.values())
        return len(known) == len(new)

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
