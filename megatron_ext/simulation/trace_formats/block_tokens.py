"""Synthetic tokens of hashed blocks: equal hashes have equal tokens."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatron_ext.simulation.trace import Ids, Pieces, append_piece, cut


class BlockTokens:
    """Tokens of the hashes of one namespace.

    Args:
        ids: Source of token ids, which all namespaces of a trace share.
    """

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self._blocks: dict[Hashable, range] = {}

    def give(self, block_size: int, block_hash: Hashable, tokens: range) -> None:
        """Give a hash that has none yet its tokens."""
        self._blocks.setdefault((block_size, block_hash), tokens)

    def prompt(self, hashes: Sequence[Hashable], length: int, block_size: int) -> Pieces:
        """Return `length` tokens: those of the blocks, the last block cut, and unique ones after them."""
        return self.prompt_after((), (), hashes, length, block_size)

    def prompt_after(
        self,
        pieces: Pieces,
        before: Sequence[Hashable],
        hashes: Sequence[Hashable],
        length: int,
        block_size: int,
    ) -> Pieces:
        """Return the tokens of a prompt, as `prompt`, by those of another; new blocks alone take time.

        Args:
            pieces: The other prompt; begins with the tokens of `before`, none of them cut.
            before: Hashes of its complete blocks.
            hashes: Hashes of this prompt's blocks.
            length: Tokens of this prompt.
            block_size: Tokens of a block.
        """
        common = min(common_length(before, hashes), length // block_size)
        found, left = list(cut(pieces, common * block_size)), length - common * block_size
        blocks = self._blocks
        for one in hashes[common:]:
            if left <= 0:
                break
            block = blocks.get((block_size, one))
            if block is None:
                block = blocks[block_size, one] = self.ids.take(block_size)
            append_piece(found, block if left >= block_size else block[:left])
            left -= block_size
        if left > 0:
            append_piece(found, self.ids.take(left))
        return tuple(found)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common start of two lists, by bisection over slices."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` are equal; among the first `high` one differs
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low
