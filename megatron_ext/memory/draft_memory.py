"""Memory of the pools of layers that draft: as many blocks as the engine has, and two states per request.

A request has as many blocks there as in the engine's own pool. Of its two states one is after the accepted tokens, the
other is the copy that drafting advances.
"""

from __future__ import annotations

from dataclasses import dataclass

STATES_OF_A_REQUEST = 2


@dataclass(frozen=True)
class DraftMemory:
    """Memory that layers of multi-token prediction need per token and per sequence.

    Attributes:
        kv_bytes_per_token: Bytes of keys and values of one token, in all of their attention layers.
        state_bytes: Bytes of the states of one sequence, in all of their recurrent layers.
        hidden_bytes: Bytes of the target model's hidden states that are kept of one sequence.
    """

    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    hidden_bytes: int = 0

    def request_bytes(self, requests: int) -> int:
        """Return the bytes of the states of `requests` requests, hidden states included."""
        return requests * (STATES_OF_A_REQUEST * self.state_bytes + self.hidden_bytes)


NO_DRAFT_LAYERS = DraftMemory()


@dataclass(frozen=True)
class DraftKVCacheConfig:
    """Sizes of the pools of layers that draft, as printed at start-up and in a run's counts.

    Attributes:
        block_bytes: Bytes of one block; the pool has as many as the engine's own.
        state_bytes: Bytes of one sequence's states.
        states: Number of states in the pool.
        hidden_bytes: Bytes of the target model's hidden states, of all requests.
    """

    block_bytes: int
    state_bytes: int
    states: int
    hidden_bytes: int = 0

    def pool_bytes(self, blocks: int) -> int:
        """Return the bytes of the pools with `blocks` blocks and the dummy block."""
        return (blocks + 1) * self.block_bytes + self.states * self.state_bytes + self.hidden_bytes


def draft_kv_cache_config(draft: DraftMemory, block_size: int, requests: int) -> DraftKVCacheConfig | None:
    """Return the sizes of the pools of layers that draft; None without them."""
    if draft == NO_DRAFT_LAYERS:
        return None
    states = STATES_OF_A_REQUEST * requests if draft.state_bytes else 0
    hidden = requests * draft.hidden_bytes
    return DraftKVCacheConfig(block_size * draft.kv_bytes_per_token, draft.state_bytes, states, hidden)
