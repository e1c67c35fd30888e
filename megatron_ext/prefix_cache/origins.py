"""Origins of cached entries: which of those in memory were put back from disk, until they leave memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_ext.prefix_cache.hash_chain import BlockHash


class DiskOrigins:
    """Blocks and snapshots in memory that were put back from disk."""

    def __init__(self) -> None:
        self._blocks: set[BlockHash] = set()
        self._snapshots: set[BlockHash] = set()

    def __bool__(self) -> bool:
        """Return whether any entry was put back."""
        return bool(self._blocks or self._snapshots)

    def add_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        """Note that blocks were put back."""
        self._blocks.update(block_hashes)

    def add_snapshot(self, block_hash: BlockHash) -> None:
        """Note that the snapshot at the end of a block was put back."""
        self._snapshots.add(block_hash)

    def has(self, block_hash: BlockHash, *, is_snapshot: bool) -> bool:
        """Return whether a block, or the snapshot at its end, was put back."""
        return block_hash in (self._snapshots if is_snapshot else self._blocks)

    def drop_blocks(self, block_hashes: Iterable[BlockHash]) -> None:
        """Note that blocks have left memory."""
        self._blocks.difference_update(block_hashes)

    def drop_snapshot(self, block_hash: BlockHash) -> None:
        """Note that a snapshot has left memory."""
        self._snapshots.discard(block_hash)

    def clear(self) -> None:
        """Note that the cache is empty."""
        self._blocks.clear()
        self._snapshots.clear()

    def tokens(
        self, matched: Sequence[BlockHash], restored: BlockHash | None, start: int, end: int, block_size: int
    ) -> int:
        """Return how many of the skipped tokens [start, end) are skipped because of entries put back from disk.

        Those are all of them if the restored snapshot was put back, or else those in blocks that were put back.

        Args:
            matched: Hashes of the matched blocks, from the start of the sequence.
            restored: Hash of the block at whose end the restored snapshot is; None without one.
            start: First token to count.
            end: Position after the last one.
            block_size: Tokens of a block.
        """
        if restored in self._snapshots:
            return max(0, end - start)
        if not self._blocks:
            return 0
        blocks = range(start // block_size, -(-end // block_size))
        return sum(
            min(end, (block + 1) * block_size) - max(start, block * block_size)
            for block in blocks
            if matched[block] in self._blocks
        )

    def check(self, blocks: Iterable[BlockHash], snapshots: Iterable[BlockHash]) -> None:
        """Assert that all entries with an origin are cached.

        Args:
            blocks: Hashes of all cached blocks.
            snapshots: Hashes of the blocks with visible snapshots.
        """
        assert self._blocks <= set(blocks), "the origin of a block outlives it"
        assert self._snapshots <= set(snapshots), "the origin of a snapshot outlives it"
