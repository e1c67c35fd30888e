"""KV events as values; `wire.py` has them as bytes. Hashes are integers of 64 bits, lists in a sequence's order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Hash = Hashable  # of others they may be bytes


@dataclass(frozen=True)
class BlockStored:
    """A run of blocks can be found.

    Attributes:
        hashes: Of the blocks.
        parent: What they continue; None at the start of a sequence.
        tokens: Of all of them.
        block_size: Tokens.
        extra_keys: What they depend on beside the tokens, for each block or None; None if none depends on anything.
    """

    hashes: Sequence[Hash]
    parent: Hash | None
    tokens: Sequence[int]
    block_size: int
    extra_keys: Sequence[object] | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks cannot be found any more, each after those that continue it."""

    hashes: Sequence[Hash]


@dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing can be found."""


@dataclass(frozen=True)
class StateStored:
    """Requests can resume behind these blocks, which can be found."""

    hashes: Sequence[Hash]


@dataclass(frozen=True)
class StateRemoved:
    """They cannot any more."""

    hashes: Sequence[Hash]


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
StateEvent = StateStored | StateRemoved
Event = BlockEvent | StateEvent
