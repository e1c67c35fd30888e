"""Progress of a request that reads and leaves data kept with blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.kept_data import DataKind


@dataclass(eq=False)
class KeptProgress:
    """Data of a request that is kept with blocks; only the scheduler writes it.

    Attributes:
        kinds: Kinds that the request reads with cached blocks, and keeps with computed ones.
        resume_position: First position computed since the request was admitted.
        known_end: Position up to which the matched blocks had all data then.
        blocks: Blocks from its start that had all data then, or have been completed since.
        new: Blocks that had no data of some kind before its last step, each with its number in the sequence.
    """

    kinds: tuple[DataKind, ...] = ()
    resume_position: int = 0
    known_end: int = 0
    blocks: int = 0
    new: dict[BlockHash, int] = field(default_factory=dict)

    @property
    def keeps_log_probs(self) -> bool:
        """True if the log-probs of the prompt are kept, and may be read."""
        return DataKind.LOG_PROBS in self.kinds
