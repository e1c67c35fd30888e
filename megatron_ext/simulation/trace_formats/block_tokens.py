"""Synthetic tokens of hashed blocks: equal hashes have equal tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatron_ext.simulation.trace import Ids, Pieces, append_piece


class BlockTokens:
    """Tokens of the hashes of one namespace.

    Args:
        ids: Source of token ids, which all namespaces of a trace share.
    """

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self._blocks: dict[Hashable, range] = {}

    def prompt(self, hashes: Sequence[Hashable], length: int, block_size: int) -> Pieces:
        """Return `length` tokens: the blocks' tokens, the last block cut, and unique tokens after them."""
        found: list[Sequence[int]] = []
        for one in hashes:
            if length <= 0:
                break
            block = self._blocks.get((block_size, one))
            if block is None:
                block = self._blocks[block_size, one] = self.ids.take(block_size)
            append_piece(found, block[:length])
            length -= block_size
        if length > 0:
            append_piece(found, self.ids.take(length))
        return tuple(found)
