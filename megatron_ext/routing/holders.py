"""Map from block keys to the replicas that have them, one bit per replica."""

from __future__ import annotations

from collections.abc import Iterable


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
