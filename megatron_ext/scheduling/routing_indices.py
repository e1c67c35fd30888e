"""Routing indices: the experts that the routers of a model chose for each token of a request.

Numbers are kept as bytes, four per expert; L is the number of MoE layers, k the number of experts per token.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass

_TYPE = "i"
assert array(_TYPE).itemsize == 4, "an int has 32 bits on every platform that torch supports"


@dataclass(frozen=True)
class RoutingIndices:
    """Experts of consecutive tokens.

    Attributes:
        data: Expert numbers, int32: for each token L rows of k.
        layers: L.
        topk: k.
    """

    data: bytes | bytearray
    layers: int
    topk: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return 4 * self.layers * self.topk

    def __len__(self) -> int:
        return len(self.data) // self.token_bytes

    def up_to(self, count: int) -> RoutingIndices:
        """Return the first tokens, at most `count`."""
        return RoutingIndices(bytes(self.data[: count * self.token_bytes]), self.layers, self.topk)

    def to_int16(self) -> bytes:
        """Return the numbers as int16, little-endian: enough for 32,768 experts."""
        assert sys.byteorder == "little", "as on every platform that this package supports"
        found = bytearray(len(self.data) // 2)
        found[0::2], found[1::2] = self.data[0::4], self.data[1::4]
        return bytes(found)

    def to_lists(self) -> list[list[list[int]]]:
        """Return the numbers as lists, [tokens][L][k]."""
        numbers, k, per_token = array(_TYPE, self.data).tolist(), self.topk, self.layers * self.topk
        return [
            [numbers[row : row + k] for row in range(first, first + per_token, k)]
            for first in range(0, len(numbers), per_token)
        ]
