"""What has happened in an engine, for the JSON output and the log."""

from __future__ import annotations

import logging

from megatron_ext.scheduling.planner import StepPlan
from megatron_ext.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


def prefix_cache_statistics(scheduler: Scheduler) -> dict[str, int] | None:
    """The `prefix_cache` object of the JSON output; None if nothing is cached."""
    if not scheduler.cache.is_enabled:
        return None
    use, counters = scheduler.cache.use(), scheduler.counters
    return {
        "blocks_total": use.blocks_total,
        "blocks_cached": use.blocks_cached,
        "blocks_evictable": use.blocks_evictable,
        "blocks_in_use": use.blocks_in_use,
        "slots_total": use.slots_total,
        "slots_used": use.slots_used,
        "hits": counters.hits,
        "blocks_evicted": use.blocks_evicted,
        "slots_evicted": use.slots_evicted,
        "snapshots_taken": use.snapshots_taken,
        "snapshots_skipped": use.snapshots_skipped,
        "coordination_waits": counters.coordination_waits,
    }


def log_step(scheduler: Scheduler, plan: StepPlan, *, step_count: int, step_time: float, ended: int) -> None:
    """One line about a step and what there is after it.

    Args:
        plan: What the step did.
        step_count: Of the engine, this step included.
        step_time: Seconds.
        ended: Requests that have, since the engine started.
    """
    queues, use, counters = scheduler.queues, scheduler.cache.use(), scheduler.counters
    computed, skipped = counters.prefill_tokens, counters.skipped_tokens
    logger.info(
        "step %d: %.3f s, %d decode + %d prefill tokens | requests: %d running, %d paused, %d waiting, %d ended | "
        "KV blocks: %d of %d in use, %d cached, %d evictable | state slots: %d of %d used | "
        "prefill tokens: %d computed, %d skipped (%.1f%%)",
        step_count,
        step_time,
        sum(chunk.is_decode for chunk in plan.chunks),
        sum(chunk.length for chunk in plan.chunks if not chunk.is_decode),
        len(queues.running),
        len(queues.paused),
        len(queues.waiting),
        ended,
        use.blocks_in_use,
        use.blocks_total,
        use.blocks_cached,
        use.blocks_evictable,
        use.slots_used,
        use.slots_total,
        computed,
        skipped,
        100 * skipped / max(1, computed + skipped),
    )
