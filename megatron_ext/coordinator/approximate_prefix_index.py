"""What a replica without events probably holds: the prompts that it has answered, as many blocks as it has.

Such a replica does not say what it has cached and what it has given up. What it computed last is there most likely; so
the router is told of it as if by events, and the oldest is taken back when more is remembered than the pool can hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from megatron_ext.coordinator.routed_request import RoutedPrompt
from megatron_ext.prefix_cache.matching import last_boundary
from megatron_ext.routing.router import Router


class ApproximatePrefixIndex:
    """Of one replica.

    Args:
        router: To be told.
        replica: Its name there.
        block_size: Tokens.
        most: Blocks to remember.
        has_states: Whether it resumes at snapshots, which it takes at the last boundary of a prompt.
    """

    def __init__(self, router: Router, replica: str, block_size: int, most: int, *, has_states: bool) -> None:
        self._router = router
        self._replica = replica
        self._block_size = block_size
        self._max = most
        self._has_states = has_states
        self._blocks: OrderedDict[int, None] = OrderedDict()  # by key, the oldest first, none before those behind it

    def __len__(self) -> int:
        return len(self._blocks)

    def answered(self, routed: RoutedPrompt) -> None:
        """It has computed a prompt."""
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
        """These are in use; the last ones, which need those before them, go first."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def cleared(self) -> None:
        """It holds nothing any more."""
        self._blocks.clear()
        self._router.cleared(self._replica)
