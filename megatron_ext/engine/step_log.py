"""Log of an engine's steps: a line about the latest step, the state after it, and the work since the last line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from megatron_ext.engine.result import EngineStep
from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.prefix_cache.cache import CacheUse
from megatron_ext.scheduling.counters import Counters

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0  # of work between two lines, without an interval


class StepLog:
    """Log of an engine's steps.

    Time without requests is no work: it leads to no line, and does not lower the tokens a second.

    Args:
        interval: Steps between two lines; 0 for no lines, None for a line every `LINE_SECONDS` of work.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, interval: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.interval = interval
        self._clock = clock
        self._ended: float | None = None  # time at which the last step ended, with requests left
        self._seconds = 0.0  # of work since the last line
        self._yielded = 0  # tokens that steps have yielded since the last line, without accepted drafts
        self._counters = Counters()  # at the last line

    def note(self, step: EngineStep, count: int, *, is_busy: bool, read: Callable[[], EngineStatistics]) -> None:
        """Note a step, and write a line if one is due.

        Args:
            step: Step that has been reported.
            count: Number of steps computed so far.
            is_busy: Whether requests are left.
            read: Returns the statistics after the step.
        """
        if self.interval == 0:
            return
        now = self._clock()
        self._seconds += step.seconds if self._ended is None else now - self._ended
        self._ended = now if is_busy else None
        results = [part.result for part in step.parts if part.result is not None]
        self._yielded += sum(len(result.tokens) for result in results)
        if self._seconds >= LINE_SECONDS if self.interval is None else step.chunks and count % self.interval == 0:
            self._write(step, read())

    def _write(self, step: EngineStep, statistics: EngineStatistics) -> None:
        """Write a line; with caching on, its part on the cache reads like megatron-core's."""
        use, now, before, seconds = statistics.use, statistics.counters, self._counters, max(self._seconds, 1e-9)
        computed, skipped = now.prefill_tokens - before.prefill_tokens, now.skipped_tokens - before.skipped_tokens
        generated = self._yielded + now.accepted - before.accepted
        decodes = [chunk.length for chunk in step.chunks if chunk.is_decode or chunk.drafts]
        logger.info(
            "step %d: %.3f s, %d decode + %d prefill tokens | requests: %d running, %d paused, %d waiting, %d ended | "
            "%.1f s of work: prompt %.1f tokens/s, generation %.1f tokens/s%s | KV blocks: %d of %d in use%s",
            statistics.steps,
            step.seconds,
            sum(decodes),
            sum(chunk.length for chunk in step.chunks) - sum(decodes),
            statistics.running,
            statistics.paused,
            statistics.waiting,
            statistics.ended,
            self._seconds,
            computed / seconds,
            generated / seconds,
            f", prefix cache hit rate {_percent(skipped, computed + skipped)}" if statistics.is_caching else "",
            use.blocks_in_use,
            use.blocks_total,
            _describe_cache(use, now) if statistics.is_caching else "",
        )
        self._seconds, self._yielded, self._counters = 0.0, 0, now


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f}%"


def _describe_cache(use: CacheUse, counters: Counters) -> str:
    """Hits and prefill since the engine started, and the cache's utilization now."""
    computed, skipped = counters.prefill_tokens, counters.skipped_tokens
    parts = [
        "",
        f"prefix cache (cumul): {counters.hits} hits, {counters.blocks_matched} blocks matched",
        f"prefill (cumul): computed {computed}, skipped {skipped} ({_percent(skipped, computed + skipped)} skipped)",
        f"prefix cache util: KV {use.blocks_cached}/{use.blocks_total} blocks cached "
        f"({use.blocks_evictable} evictable)",
    ]
    if use.slots_total:
        durable = use.slots_used + use.provisional_slots
        parts[-1] += f", mamba {durable}/{use.slots_total} durable slots ({use.slots_used} without opportunistic ones)"
    return " ... ".join(parts)
