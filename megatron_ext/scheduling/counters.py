"""What has happened since the engine started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Counters:
    """Written by the scheduler; read as a copy (see `EngineStatistics`)."""

    preemptions: int = 0
    pauses: int = 0
    hits: int = 0  # admissions that skipped something
    blocks_matched: int = 0
    skipped_tokens: int = 0  # prompt tokens that no layer computed
    prefill_tokens: int = 0  # prefill tokens computed, for the first time or again
    coordination_waits: int = 0  # requests that waited for another one's prefix
    lost_requests: int = 0  # admissions that would have skipped more with unlimited memory (SI-6)
    lost_slot_tokens: int = 0  # prompt tokens that more snapshot slots would have saved them
    lost_block_tokens: int = 0  # and more blocks beside
    lost_ago: int = 0  # requests admitted since what was wanted was given up; summed over `lost_requests`
    drafted: int = 0  # drafts that steps have verified
    accepted: int = 0  # those of them that came
    launched_ahead: int = 0  # steps that were launched before the tokens of the one before were known

    def note_lost(self, slot_tokens: int, block_tokens: int, ago: int) -> None:
        """An admission would have skipped more."""
        self.lost_requests += 1
        self.lost_slot_tokens += slot_tokens
        self.lost_block_tokens += block_tokens
        self.lost_ago += ago

    @classmethod
    def total(cls, parts: Iterable[Counters]) -> Counters:
        """Of several schedulers."""
        whole = cls()
        for part in parts:
            for field in dataclasses.fields(cls):
                setattr(whole, field.name, getattr(whole, field.name) + getattr(part, field.name))
        return whole
