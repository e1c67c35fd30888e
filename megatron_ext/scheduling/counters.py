"""Scheduler counters since the engine started, and what an admission adds to them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.eviction_history import NOTHING_LOST
from megatron_ext.scheduling.plan import Admission, SchedulerLimits


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


def note_use(admission: Admission, cache: PrefixCache, limits: SchedulerLimits, counters: Counters) -> None:
    """Note what an admission uses, before any allocation, so that the snapshot it resumes from goes last."""
    request = admission.request
    if cache.origins and admission.chunk.start > 0:
        tokens = _tokens_from_disk(admission, cache, limits.block_size)
        request.ledger.skipped_from_disk += tokens
        counters.disk_skipped_tokens += tokens
        counters.disk_hits += tokens > 0
    if admission.restore is not None:
        assert cache.states is not None, "only states are restored"
        cache.states.consume(admission.restore.block_hash)
        request.snapshot_plan.used.append(admission.restore.block_hash)


def _tokens_from_disk(admission: Admission, cache: PrefixCache, block_size: int) -> int:
    """Return the prompt tokens that an admission skips for the first time because of entries put back from disk."""
    request, ledger = admission.request, admission.request.ledger
    if not admission.matched:  # it skips nothing, or only tokens that its source computes
        return 0
    end = min(admission.chunk.start, ledger.prompt_length)
    matched = request.block_hashes[: len(admission.matched)]
    restored = None if admission.restore is None else admission.restore.block_hash
    return cache.origins.tokens(matched, restored, ledger.known_end, end, block_size)


def count_hit(admission: Admission, cache: PrefixCache, limits: SchedulerLimits, counters: Counters) -> None:
    """Count an admission that skips tokens; the blocks that a fork shares are counted once they are published."""
    start = admission.chunk.start
    counters.hits += start > 0
    if start > 0 and admission.matched:
        cache.count_hit(admission.matched[limits.blocks_for(start) - 1])


def count_lost(admission: Admission, cache: PrefixCache, limits: SchedulerLimits, counters: Counters) -> None:
    """Count the tokens that a first admission computes because cached entries were evicted, and note its prompt."""
    request, matched, start = admission.request, len(admission.matched), admission.chunk.start
    cache.note_prompt(request.block_hashes)
    if admission.usable_blocks < matched:  # cached blocks lack data
        return
    history, size = cache.eviction_history, limits.block_size
    lost = history.lost(len(request.tokens), request.block_hashes, matched, start, size, cache.states)
    if lost is not NOTHING_LOST:
        counters.lost_requests += 1
        counters.lost_slot_tokens += lost.for_slots
        counters.lost_block_tokens += lost.for_blocks
        counters.lost_ago += lost.ago
