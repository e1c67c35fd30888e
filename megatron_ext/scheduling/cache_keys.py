"""Roots of the block hashes of requests."""

from __future__ import annotations

from megatron_ext.prefix_cache.hash_chain import BlockHash, HashChain, root_hash
from megatron_ext.scheduling.sequence import Sequence


class CacheKeys:
    """Roots of block hashes: everything except the tokens that KV and states depend on.

    Args:
        fingerprint: Fingerprint of the model and of how it computes.
        block_size: Tokens of a block.
    """

    def __init__(self, fingerprint: bytes, block_size: int) -> None:
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._weights_version = 0

    def weights_changed(self) -> None:
        """Use new roots from now on, since the weights have changed."""
        self._weights_version += 1

    def start(self, sequence: Sequence, salt: str | None) -> None:
        """Give a sequence the root of its block hashes, unless it has that root already."""
        root = self.root(salt)
        if sequence.chain is None or sequence.chain.root != root:
            sequence.chain = HashChain(root, self._block_size)

    def root(self, salt: str | None) -> BlockHash:
        """Return the root of the block hashes of sequences with a salt."""
        return root_hash(
            [
                self._fingerprint,
                self._weights_version.to_bytes(8, "little"),
                self._block_size.to_bytes(8, "little"),
                *([] if salt is None else [salt.encode("utf-8", "surrogatepass")]),  # JSON may contain lone surrogates
            ]
        )
