"""Notes and counts of what an admission finds in the cache, and of what it would have found with more memory."""

from __future__ import annotations

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.ghosts import NOTHING_LOST
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.plan import Admission, SchedulerLimits
from megatron_ext.scheduling.planner import reads_cache


def note_use(admission: Admission, cache: PrefixCache, limits: SchedulerLimits) -> None:
    """Note what an admission uses, before any allocation, so that the snapshot it resumes from goes last."""
    request, matched = admission.request, admission.matched
    if request.sequence.ledger.matched_blocks is None and reads_cache(request):
        cache.note_divergence(matched, limits.blocks_for(admission.chunk.start))
    if admission.restore is not None:
        assert cache.states is not None, "only states are restored"
        cache.states.consume(admission.restore.block_hash)
        request.sequence.snapshot_plan.used.append(admission.restore.block_hash)


def count_hit(admission: Admission, cache: PrefixCache, limits: SchedulerLimits, counters: Counters) -> None:
    """Count an admission that skips tokens."""
    start = admission.chunk.start
    if start > 0:
        counters.hits += 1
        cache.count_hit(admission.matched[limits.blocks_for(start) - 1])


def count_lost(admission: Admission, cache: PrefixCache, limits: SchedulerLimits, counters: Counters) -> None:
    """Count the tokens that a first admission computes because cached entries were evicted, and note its prompt."""
    request, matched, start = admission.request, len(admission.matched), admission.chunk.start
    cache.note_prompt(request.block_hashes)
    lost = cache.ghosts.lost(len(request.tokens), request.block_hashes, matched, start, limits.block_size, cache.states)
    if lost is not NOTHING_LOST:
        counters.note_lost(lost.for_slots, lost.for_blocks, lost.ago)
