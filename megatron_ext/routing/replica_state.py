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
        self._keys: dict[Hash, int] = {}  # blocks that the replica holds
        self._states: dict[Hash, int] = {}  # snapshots
        if has_states:
            index.with_states |= self.bit

    @property
    def pending(self) -> int:
        """Number of requests that have not ended, including requests from other routers."""
        return len(self.in_flight) + self.other_requests

    @property
    def blocks(self) -> int:
        """Number of blocks that the replica holds, by its events."""
        return len(self._keys)

    @property
    def held(self) -> int:
        """Number of tokens that the replica holds, by its events."""
        return len(self._keys) * self.index.block_size

    @property
    def states(self) -> int:
        """Number of snapshots that the replica holds, by its events."""
        return len(self._states)

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
        extras: ExtraKeys | None,
    ) -> bool:
        """Add a run of blocks; see `Router.stored`."""
        ids, size = packed(tokens), self.index.block_size
        if len(ids) != len(hashes) * size:
            raise ValueError(f"{len(hashes)} blocks of {size} tokens come with {len(ids)} token ids")
        before = ROOT if parent is None else self._keys.get(parent)
        if before is None:
            return False
        for one, key in zip(hashes, chained_keys(before, ids, size, frozen_extras(extras)), strict=True):
            if one in self._keys:
                if self._keys[one] == key:
                    continue
                self.removed([one])
            self._keys[one] = key
            self.index.stored.add(self.bit, [key])
        return True

    def removed(self, hashes: Iterable[Hash]) -> None:
        """Remove blocks and the snapshots at their ends; see `Router.removed`."""
        removed = [one for one in hashes if one in self._keys]
        self.state_removed(removed)
        self.index.stored.discard(self.bit, [self._keys.pop(one) for one in dict.fromkeys(removed)])

    def state_stored(self, hashes: Iterable[Hash]) -> bool:
        """Add snapshots; see `Router.state_stored`."""
        new = [one for one in dict.fromkeys(hashes) if one not in self._states]
        known = {one: self._keys[one] for one in new if one in self._keys}
        self._states.update(known)
        self.index.states.add(self.bit, known.values())
        return len(known) == len(new)

    def state_removed(self, hashes: Iterable[Hash]) -> None:
        """Remove snapshots; see `Router.state_removed`."""
        removed = [one for one in dict.fromkeys(hashes) if one in self._states]
        self.index.states.discard(self.bit, [self._states.pop(one) for one in removed])

    def cleared(self) -> None:
        """Remove all blocks and snapshots."""
        self.state_removed(list(self._states))
        self.removed(list(self._keys))

    def resumes_after(self, key: int) -> bool:
        """Return whether a request can resume after a block, by the replica's events alone."""
        here = self.index.stored.bits.get(key, 0)
        return bool(here & (self.index.states.bits.get(key, 0) if self.has_states else here) & self.bit)

    def picture(self) -> tuple[set[Hash], set[Hash]]:
        """Return the hashes of the replica's blocks and snapshots, for tests."""
        return set(self._keys), set(self._states)

    def check(self) -> None:
        """Assert that the index has the replica's blocks and snapshots, with the right number of occurrences."""
        assert self.index.stored.counts(self.bit) == Counter(self._keys.values()), f"blocks of {self.name}"
        assert self.index.states.counts(self.bit) == Counter(self._states.values()), f"snapshots of {self.name}"
