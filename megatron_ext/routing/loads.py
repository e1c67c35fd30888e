"""Loads of replicas in tokens yet to be computed, and selection of the least loaded one."""

from __future__ import annotations

from bisect import bisect_left, insort

_FEW = 12  # replicas; up to this number they are compared directly, not searched in the order of all


class Loads:
    """Replicas, by the number of their bit, in the order of their loads.

    Among equal loads the replica that received the fewest tokens so far comes first, so that an idle fleet fills
    evenly.
    """

    def __init__(self) -> None:
        self._order: list[tuple[int, int, int]] = []  # (load, given, number), sorted
        self._entries: dict[int, tuple[int, int, int]] = {}

    def join(self, number: int) -> None:
        """Add a replica without load; its received tokens start at the minimum of the others."""
        given = min((entry[1] for entry in self._order), default=0)
        self._put(number, 0, given)

    def leave(self, number: int) -> None:
        """Remove a replica."""
        entry = self._entries.pop(number)
        del self._order[bisect_left(self._order, entry)]

    def load(self, number: int) -> int:
        """Return the load of a replica in tokens."""
        return self._entries[number][0]

    def give(self, number: int, tokens: int) -> None:
        """Add tokens to the load of a replica."""
        load, given, _ = self._entries[number]
        self.leave(number)
        self._put(number, load + tokens, given + tokens)

    def shift(self, number: int, tokens: int) -> None:
        """Add tokens to the load of a replica, or subtract them, that it did not receive from this router."""
        load, given, _ = self._entries[number]
        assert load + tokens >= 0, f"{-tokens} tokens of {load} taken"
        self.leave(number)
        self._put(number, load + tokens, given)

    def take(self, number: int, tokens: int) -> None:
        """Subtract tokens from the load of a replica: they have been computed, or their request has ended."""
        load, given, _ = self._entries[number]
        assert tokens <= load, f"{tokens} tokens of {load} taken"
        self.leave(number)
        self._put(number, load - tokens, given)

    def _put(self, number: int, load: int, given: int) -> None:
        entry = load, given, number
        self._entries[number] = entry
        insort(self._order, entry)

    def least(self, bits: int) -> int:
        """Return the number of the least loaded replica among `bits`, at least one of which is set."""
        if bits.bit_count() <= _FEW:
            return min(self._entries[number] for number in numbers(bits))[2]
        return next(number for _, _, number in self._order if bits >> number & 1)

    def lowest(self) -> int:
        """Return the lowest load of all replicas; 0 without replicas."""
        return self._order[0][0] if self._order else 0


def numbers(bits: int) -> list[int]:
    """Return the positions of the set bits, the lowest first."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
