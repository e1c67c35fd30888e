"""Statistics of an engine and counts of its steps, read once for results, metrics, status page and log."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

from megatron_ext.engine.cache_audit import AuditCounts, AuditFinding, CacheAudit
from megatron_ext.prefix_cache.cache import CacheUse
from megatron_ext.prefix_cache.disk.store_use import DiskUse
from megatron_ext.scheduling.counters import Counters
from megatron_ext.scheduling.prefix_wait.waiting_queue import WaitingQueue
from megatron_ext.scheduling.queue import RequestQueue
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.spec_decode.draft_counts import SpeculationUse

SLAB_COUNTS = (
    "slabs_total",
    "slabs_of_blocks",
    "slabs_of_snapshots",
    "slabs_retyped",
    "blocks_moved",
)
Counts = TypeVar("Counts", AuditCounts, CacheUse, Counters)


@dataclass(frozen=True)
class StepCounts:
    """Counts of steps since the engine started, or of an interval.

    Attributes:
        steps: Steps that computed something.
        captured: Number of captured steps by the rows of their graph, dummy requests included; eager steps are not in.
        asynchronous: Steps that were launched before the tokens of the previous step were known.
        discarding: Steps launched so of which rows, or all, were discarded since their requests had ended.
        prefill_tokens: Prefill tokens computed, recomputed ones included.
    """

    steps: int = 0
    captured: Counter[int] = field(default_factory=Counter)
    asynchronous: int = 0
    discarding: int = 0
    prefill_tokens: int = 0

    def __sub__(self, earlier: StepCounts) -> StepCounts:
        """Return the counts of the interval that began with `earlier`."""
        return StepCounts(
            steps=self.steps - earlier.steps,
            captured=self.captured - earlier.captured,
            asynchronous=self.asynchronous - earlier.asynchronous,
            discarding=self.discarding - earlier.discarding,
            prefill_tokens=self.prefill_tokens - earlier.prefill_tokens,
        )


def total(parts: Sequence[Counts]) -> Counts:
    """Return the sum of the counts of several replicas, field by field; with one replica its own."""
    if len(parts) == 1:  # a server reads them in each step
        return parts[0]
    names = [field.name for field in dataclasses.fields(parts[0])]
    return type(parts[0])(**{name: sum(getattr(part, name) for part in parts) for name in names})


@dataclass(frozen=True)
class EngineStatistics:
    """Statistics of an engine between two steps.

    Attributes:
        running: Requests in the batch.
        waiting: Requests that wait for admission.
        paused: Requests without a block for their next token.
        ended: Requests that have been reported as ended.
        steps: Steps computed since the engine started.
        is_caching: True if prefix caching is on.
        use: Use of blocks and snapshot slots.
        counters: Copy of the counters.
        speculation: Draft statistics; None without speculation.
        audit: Counts of audits; None if no hits are audited.
        disk: Counts of the entries on disk; None without a directory.
        cached_bytes: Bytes of cached blocks and snapshots in memory, on all ranks.
        audit_findings: Last wrong entries that audits found, the oldest first.
    """

    running: int
    waiting: int
    paused: int
    ended: int
    steps: int
    is_caching: bool
    use: CacheUse
    counters: Counters
    speculation: SpeculationUse | None = None
    audit: AuditCounts | None = None
    disk: DiskUse | None = None
    cached_bytes: int = 0
    audit_findings: tuple[AuditFinding, ...] = ()

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[Scheduler, CacheAudit | None]],
        *,
        ended: int = 0,
        steps: int = 0,
        disk: DiskUse | None = None,
    ) -> EngineStatistics:
        """Read the statistics, summed over replicas that step together, in the engine's thread.

        Args:
            parts: Scheduler of each replica, and its audits; None without any.
            ended: See the class, also the next two.
            steps: Likewise.
            disk: Likewise.
        """
        schedulers, audits = [one for one, _ in parts], [audit for _, audit in parts if audit is not None]

        def size(queue: RequestQueue | WaitingQueue) -> int:
            return sum(request.audit is None for request in queue) if audits else len(queue)

        use, costs = total([one.cache.use() for one in schedulers]), schedulers[0].limits.costs
        snapshots = use.slots_used + use.provisional_slots
        uses = [one.drafts.use for one in schedulers if one.limits.max_drafts]
        findings = [finding for audit in audits for finding in audit.findings]
        return cls(
            running=sum(size(one.queues.running) for one in schedulers),
            waiting=sum(size(one.queues.waiting) for one in schedulers),
            paused=sum(len(one.queues.paused) for one in schedulers),
            ended=ended,
            steps=steps,
            is_caching=schedulers[0].cache.is_enabled,
            use=use,
            counters=dataclasses.replace(total([one.counters for one in schedulers])),
            speculation=SpeculationUse.total(uses) if uses else None,
            audit=dataclasses.replace(total([audit.counts for audit in audits])) if audits else None,
            disk=disk,
            cached_bytes=use.blocks_cached * costs.block_bytes + snapshots * costs.state_bytes,
            audit_findings=tuple(sorted(findings, key=attrgetter("wall_time"))),
        )

    def prefix_cache(self) -> dict[str, float] | None:
        """Return the `prefix_cache` object of a run's counts; None if caching is off."""
        if not self.is_caching:
            return None
        shows_slabs = self.use.slabs_total > 0
        counts = dataclasses.asdict(self.use).items()
        audit = {} if self.audit is None else dataclasses.asdict(self.audit)
        return (
            {name: count for name, count in counts if shows_slabs or name not in SLAB_COUNTS}
            | {"hits": self.counters.hits, "coordination_waits": self.counters.coordination_waits}
            | {f"audit_{name}": value for name, value in audit.items()}
        )

    def prefix_cache_lost(self) -> dict[str, int] | None:
        """Return the `prefix_cache_lost` object of a run's counts (SI-6); None if caching is off."""
        if not self.is_caching:
            return None
        counters = self.counters
        return {
            "requests": counters.lost_requests,
            "tokens_for_want_of_slots": counters.lost_slot_tokens,
            "tokens_for_want_of_blocks": counters.lost_block_tokens,
            "requests_since_given_up": counters.lost_ago // max(1, counters.lost_requests),
        }

    def prefix_cache_disk(self) -> dict[str, object] | None:
        """Return the `prefix_cache_disk` object of a run's counts; None without a directory."""
        if self.disk is None:
            return None
        counters = self.counters
        return {"hits": counters.disk_hits, "skipped_tokens": counters.disk_skipped_tokens} | self.disk.shown()

    def value(self, path: str) -> int:
        """Return a number by its dotted name."""
        found: object = self
        for name in path.split("."):
            found = getattr(found, name)
        assert isinstance(found, int), f"{path} is not a number"
        return found
