"""Scheduler counters since the engine started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Counters written by the scheduler; read as a copy (see `EngineStatistics`)."""

    preemptions: int = 0
    pauses: int = 0
    hits: int = 0  # admissions that skipped prompt tokens
    blocks_matched: int = 0
    skipped_tokens: int = 0  # prompt tokens that no layer computed
    disk_hits: int = 0  # hits that used entries put back from disk
    disk_skipped_tokens: int = 0  # tokens that they skipped because of these entries
    prefill_tokens: int = 0  # prefill tokens computed, for the first time or again; without audits
    coordination_waits: int = 0  # requests that waited for a prefix, or a whole prompt, that another one computes
    overtakes: int = 0  # admissions of requests before others that arrived earlier, under `lpm`
    lost_requests: int = 0  # admissions that would have skipped more with unlimited memory (SI-6)
    lost_slot_tokens: int = 0  # prompt tokens that more snapshot slots would have saved these requests
    lost_block_tokens: int = 0  # prompt tokens that more blocks would have saved in addition
    lost_ago: int = 0  # requests admitted since the eviction of the missing entry; summed over `lost_requests`
    drafted: int = 0  # draft tokens verified
    accepted: int = 0  # draft tokens accepted
    launched_ahead: int = 0  # steps that were launched before the tokens of the one before were known

    def note_lost(self, slot_tokens: int, block_tokens: int, ago: int) -> None:
        """Count an admitted request that would have skipped more prompt tokens with unlimited memory.

        Args:
            slot_tokens: Prompt tokens that more snapshot slots would have saved.
            block_tokens: Prompt tokens that more blocks would have saved in addition.
            ago: Requests admitted since the eviction of the missing entry.
        """
        self.lost_requests += 1
        self.lost_slot_tokens += slot_tokens
        self.lost_block_tokens += block_tokens
        self.lost_ago += ago
