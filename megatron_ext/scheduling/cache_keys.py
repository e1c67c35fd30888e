"""What the cache keys of a request begin with."""

from __future__ import annotations

from megatron_ext.prefix_cache.hash_chain import BlockHash, HashChain, root_hash
from megatron_ext.scheduling.sequence import Sequence


class CacheKeys:
    """Roots of block hashes: everything beside the tokens that KV and states depend on.

    Args:
        fingerprint: Of the model and of how it computes.
        block_size: Tokens.
    """

    def __init__(self, fingerprint: bytes, block_size: int) -> None:
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._weights_version = 0

    def weights_changed(self) -> None:
        """Keys made from now on are of other weights."""
        self._weights_version += 1

    def start(self, sequence: Sequence, salt: str | None) -> None:
        """Give a sequence the root of its keys, unless it has it already."""
        root = self._root(salt)
        if sequence.chain is None or sequence.chain.root != root:
            sequence.chain = HashChain(root, self._block_size)

    def _root(self, salt: str | None) -> BlockHash:
        return root_hash(
            [
                self._fingerprint,
                self._weights_version.to_bytes(8, "little"),
                self._block_size.to_bytes(8, "little"),
                *([] if salt is None else [salt.encode("utf-8", "surrogatepass")]),  # JSON has halves of characters
            ]
        )
