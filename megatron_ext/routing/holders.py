"""Who has which key: for each key a bit for each replica."""

from __future__ import annotations

from collections.abc import Iterable


class Holders:
    """A set of replicas for each key that any of them has, as the bits of one integer.

    A replica may have a key several times over (several requests in flight begin alike); it has it until each is gone.
    """

    def __init__(self) -> None:
        self.bits: dict[int, int] = {}  # key -> replicas; never 0. Read it; change it by `add` and `discard` only
        self._again: dict[int, dict[int, int]] = {}  # replica's bit -> key -> how many more than once, never 0

    def __len__(self) -> int:
        return len(self.bits)

    def add(self, bit: int, keys: Iterable[int]) -> None:
        """The replica of `bit` has each of these once more."""
        bits = self.bits
        get = bits.get
        for key in keys:
            there = get(key)
            if there is None:
                bits[key] = bit  # the replica's own integer: what one replica alone has costs none of its own
            elif there & bit:
                again = self._again.setdefault(bit, {})
                again[key] = again.get(key, 0) + 1
            else:
                bits[key] = there | bit

    def discard(self, bit: int, keys: Iterable[int]) -> None:
        """The replica of `bit`, which has each of these, has them once less."""
        if bit in self._again:
            keys = self._gone(bit, keys)
        bits = self.bits
        for key in keys:
            left = bits[key] ^ bit
            if left:
                bits[key] = left
            else:
                del bits[key]

    def _gone(self, bit: int, keys: Iterable[int]) -> list[int]:
        """Those that the replica does not have any more, after having each of `keys` once less."""
        again, gone = self._again[bit], []
        for key in keys:
            more = again.pop(key, 0)
            if more == 0:
                gone.append(key)
            elif more > 1:
                again[key] = more - 1
        if not again:
            del self._again[bit]
        return gone

    def counts(self, bit: int) -> dict[int, int]:
        """What the replica of `bit` has, and how often; for tests, which look at all."""
        again = self._again.get(bit, {})
        return {key: 1 + again.get(key, 0) for key, there in self.bits.items() if there & bit}
