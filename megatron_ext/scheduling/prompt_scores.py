"""Progress of a request whose prompt log-probs are kept with its blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.prefix_cache.hash_chain import BlockHash


@dataclass(eq=False)
class PromptScores:
    """Prompt log-probs that are kept with blocks; only the scheduler writes them.

    Attributes:
        are_kept: Whether those of this request are kept, and may be read.
        resume_position: First position computed since the request was admitted.
        known_end: Position up to which the matched blocks had log-probs then.
        blocks: Blocks from its start whose log-probs were kept then, or have been computed since.
        new: Blocks that had no log-probs before its last step.
    """

    are_kept: bool = False
    resume_position: int = 0
    known_end: int = 0
    blocks: int = 0
    new: list[BlockHash] = field(default_factory=list)
