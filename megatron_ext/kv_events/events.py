"""KV events as Python objects; `channel.py` encodes them. Hashes are 64-bit integers, in the order of the sequence.

Events of blocks are vLLM's. Events of states (snapshots of recurrent layers) are this package's, and are published on a
socket of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Hash: TypeAlias = int
MEMORY = "GPU"  # medium: the first tier of KV on any device; routers use it as a weight
DISK = "DISK"  # medium: the directory of a cache that survives restarts


@dataclass(frozen=True)
class BlockStored:
    """Event: a run of blocks can be found.

    Attributes:
        hashes: Hashes of the blocks.
        parent: Hash of the block before the run; None at the start of a sequence.
        tokens: Token ids of all blocks.
        block_size: Tokens of a block.
        extra_keys: Extra keys of each block besides its tokens, or None for a block without; None if no block has any.
        medium: Where the blocks are, as in the next three: `MEMORY` or `DISK`.
    """

    hashes: Sequence[Hash]
    parent: Hash | None
    tokens: Sequence[int]
    block_size: int
    extra_keys: Sequence[Sequence[str] | None] | None = None
    medium: str = MEMORY


@dataclass(frozen=True)
class BlockRemoved:
    """Event: blocks cannot be found any more, in memory each listed after its children."""

    hashes: Sequence[Hash]
    medium: str = MEMORY


@dataclass(frozen=True)
class AllBlocksCleared:
    """Event: the cache has no blocks, in no medium."""


@dataclass(frozen=True)
class StateStored:
    """Event: requests can resume after these blocks.

    The blocks are stored, but their events travel on another socket: a reader may receive them later. On disk they may
    be missing.
    """

    hashes: Sequence[Hash]
    medium: str = MEMORY


@dataclass(frozen=True)
class StateRemoved:
    """Event: requests can no longer resume after these blocks."""

    hashes: Sequence[Hash]
    medium: str = MEMORY


@dataclass(frozen=True)
class AllStatesCleared:
    """Event: requests can resume after no block, in no medium."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
StateEvent = StateStored | StateRemoved | AllStatesCleared
Event = BlockEvent | StateEvent
