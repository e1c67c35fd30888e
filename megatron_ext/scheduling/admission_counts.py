"""Notes and counts of an admission's cached tokens, and of tokens that more memory would have kept for it."""

from __future__ import annotations

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.eviction_history import NOTHING_LOST
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.plan import Admission, SchedulerLimits


def note_use(admission: Admission, cache: PrefixCache, limits: SchedulerLimits, counters: Counters) -> None:
    """Note what an admission uses, before any allocation, so that the snapshot it resumes from goes last."""
    request = admission.request
    if cache.origins and admission.chunk.start > 0:
        tokens = _tokens_from_disk(admission, cache, limits.block_size)
        request.sequence.ledger.skipped_from_disk += tokens
        counters.disk_skipped_tokens += tokens
        counters.disk_hits += tokens > 0
    if admission.restore is not None:
        assert cache.states is not None, "only states are restored"
        cache.states.consume(admission.restore.block_hash)
        request.sequence.snapshot_plan.used.append(admission.restore.block_hash)


def _tokens_from_disk(admission: Admission, cache: PrefixCache, block_size: int) -> int:
    """Return the prompt tokens that an admission skips for the first time because of entries put back from disk."""
    request, ledger = admission.request, admission.request.sequence.ledger
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
        counters.note_lost(lost.for_slots, lost.for_blocks, lost.ago)
