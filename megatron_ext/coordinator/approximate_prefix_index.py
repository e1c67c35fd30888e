"""Approximate prefix index of a replica without KV events: its answered prompts, limited to the size of its pool.

Such a replica does not publish stored and evicted blocks. The blocks that it computed last are most likely cached; the
router is told of them as if by events, and the oldest are removed when the index exceeds the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from megatron_ext.coordinator.routed_request import RoutedPrompt
from megatron_ext.prefix_cache.matching import last_boundary
from megatron_ext.routing.router import Router


class ApproximatePrefixIndex:
    """Approximate prefix index of one replica.

    Args:
        router: Router that is told of the blocks.
        replica: Name of the replica in the router.
        block_size: Tokens of a block.
        max_blocks: Maximum number of blocks.
        has_states: Whether the replica resumes at snapshots, which it takes at the last boundary of a prompt.
    """

    def __init__(self, router: Router, replica: str, block_size: int, max_blocks: int, *, has_states: bool) -> None:
        self._router = router
        self._replica = replica
        self._block_size = block_size
        self._max = max_blocks
        self._has_states = has_states
        self._blocks: OrderedDict[int, None] = OrderedDict()  # by key, oldest first, each after its descendants

    def __len__(self) -> int:
        return len(self._blocks)

    def answered(self, routed: RoutedPrompt) -> None:
        """Add a prompt that the replica has computed."""
        size = self._block_size
        keys = routed.prompt.keys(size)[: self._max]
        known = next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))
        new = keys[known:]
        self._touch(keys[:known])  # before anything is given up
        while len(self._blocks) + len(new) > self._max:
            self._router.removed(self._replica, [self._blocks.popitem(last=False)[0]])
        if new:
            parent, extras = (keys[known - 1], None) if known else (None, routed.extra_keys)
            tokens = routed.tokens[known * size : len(keys) * size]
            self._router.stored(self._replica, new, parent, tokens, extras)
            self._blocks.update(dict.fromkeys(reversed(new)))
            self._touch(keys[:known])
        boundary = last_boundary(len(routed.tokens), size) // size
        if self._has_states and 0 < boundary <= len(keys):
            self._router.state_stored(self._replica, [keys[boundary - 1]])

    def _touch(self, keys: Sequence[int]) -> None:
        """Mark keys as used; later blocks are evicted before the blocks that they depend on."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def cleared(self) -> None:
        """Remove all blocks, after the replica has emptied its cache."""
        self._blocks.clear()
        self._router.cleared(self._replica)
