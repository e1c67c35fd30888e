"""Tokens that replicas have yet to compute, and which of some replicas has the fewest."""

from __future__ import annotations

from bisect import bisect_left, insort

_FEW = 12  # replicas that are compared with each other rather than looked for in the order of all


class Loads:
    """Replicas by the number of their bit, in the order of their loads.

    Among equal loads the one that was given the least so far comes first, so that an idle fleet fills evenly.
    """

    def __init__(self) -> None:
        self._order: list[tuple[int, int, int]] = []  # (load, given, number), sorted
        self._entries: dict[int, tuple[int, int, int]] = {}

    def join(self, number: int) -> None:
        """A replica without load; what the others were given so far is not caught up with."""
        given = min((entry[1] for entry in self._order), default=0)
        self._put(number, 0, given)

    def leave(self, number: int) -> None:
        """Forget it."""
        entry = self._entries.pop(number)
        del self._order[bisect_left(self._order, entry)]

    def load(self, number: int) -> int:
        """Tokens."""
        return self._entries[number][0]

    def give(self, number: int, tokens: int) -> None:
        """So many more are to be computed."""
        load, given, _ = self._entries[number]
        self.leave(number)
        self._put(number, load + tokens, given + tokens)

    def take(self, number: int, tokens: int) -> None:
        """So many have been computed, or need not be any more."""
        load, given, _ = self._entries[number]
        assert tokens <= load, f"{tokens} tokens of {load} taken"
        self.leave(number)
        self._put(number, load - tokens, given)

    def _put(self, number: int, load: int, given: int) -> None:
        entry = load, given, number
        self._entries[number] = entry
        insort(self._order, entry)

    def least(self, bits: int) -> int:
        """The number of the replica with the least load among those of `bits`, of which there is one."""
        if bits.bit_count() <= _FEW:
            return min(self._entries[number] for number in numbers(bits))[2]
        return next(number for _, _, number in self._order if bits >> number & 1)

    def lowest(self) -> int:
        """The least load of all; 0 without replicas."""
        return self._order[0][0] if self._order else 0


def numbers(bits: int) -> list[int]:
    """Places of the bits that are set, the lowest first."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found
