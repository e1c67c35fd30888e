"""What a draft model's pools take of the budget: blocks under the same number as the large model's, two states each.

A request that both models read has as many blocks in each pool, and the draft model has two states of it: the one that
it drafts with, and the one that it goes on from.
"""

from __future__ import annotations

from dataclasses import dataclass

STATES_OF_A_REQUEST = 2


@dataclass(frozen=True)
class DraftMemory:
    """What a draft model needs.

    Attributes:
        kv_bytes_per_token: All attention layers, key and value.
        state_bytes: All recurrent layers, one sequence.
    """

    kv_bytes_per_token: int = 0
    state_bytes: int = 0

    def request_bytes(self, requests: int) -> int:
        """Of the states of so many requests."""
        return STATES_OF_A_REQUEST * requests * self.state_bytes


NO_DRAFT_MODEL = DraftMemory()


@dataclass(frozen=True)
class DraftKVCacheConfig:
    """The draft model's pools, as printed at start-up and in the JSON output.

    Attributes:
        block_bytes: Of one block; there are as many as in the large model's pool.
        state_bytes: Of one sequence's states.
        states: For which there is room.
    """

    block_bytes: int
    state_bytes: int
    states: int

    def pool_bytes(self, blocks: int) -> int:
        """Of its pools with so many blocks, and the dummy one."""
        return (blocks + 1) * self.block_bytes + self.states * self.state_bytes


def draft_kv_cache_config(draft: DraftMemory, block_size: int, requests: int) -> DraftKVCacheConfig | None:
    """Of the pools of a draft model; None if there is none."""
    if draft == NO_DRAFT_MODEL:
        return None
    states = STATES_OF_A_REQUEST * requests if draft.state_bytes else 0
    return DraftKVCacheConfig(block_size * draft.kv_bytes_per_token, draft.state_bytes, states)
