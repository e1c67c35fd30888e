"""Audits of the prefix cache while it serves: hits are computed once more without it, and the entries compared (EX-15).

An audit is a request of the engine itself: it neither reads nor writes the cache and generates nothing. It runs while
no other request lives, or within a share of all prefill tokens, one audit at a time.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from megatron_ext.config import RequestParams
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.public_hash import public_hash
from megatron_ext.scheduling.audit import AuditTarget, Differences
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission
from megatron_ext.scheduling.record import Outcome, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

AUDIT_SHARE: Final = 0.02
"""Share of the prefill tokens that audits may add while other requests live."""
MAX_DUE: Final = 64
"""Hits that wait for their audit; when there are more, the one that has waited longest is left out."""
MAX_FINDINGS: Final = 16
"""Findings that are kept for reports."""
_LAST: Final = 2**62  # arrival number greater than any other request's
_PARAMS: Final = RequestParams(num_tokens_to_generate=0, enable_prefix_caching=False)


@dataclass
class AuditCounts:
    """Counts since the engine started.

    Attributes:
        due: Hits that were to be audited.
        completed: Audits that compared all entries of their hit.
        left_out_busy: Hits left out for want of time: other requests lived, and the share was spent.
        left_out_evicted: Hits left out, or audits ended, because an entry was no longer cached.
        left_out_memory: Hits left out because an audit would take more than half of the blocks.
        blocks: Blocks compared.
        snapshots: Snapshots compared.
        wrong_blocks: Audits that found a block whose keys or values differ beyond the bound.
        wrong_snapshots: Audits that found a snapshot whose states differ beyond the bound.
        dropped_blocks: Blocks that were dropped because they, or blocks that they depend on, were wrong.
        seconds: Time of steps, in proportion to the tokens that audits had in them.
        tokens: Tokens that audits of cached entries computed.
    """

    due: int = 0
    completed: int = 0
    left_out_busy: int = 0
    left_out_evicted: int = 0
    left_out_memory: int = 0
    blocks: int = 0
    snapshots: int = 0
    wrong_blocks: int = 0
    wrong_snapshots: int = 0
    dropped_blocks: int = 0
    seconds: float = 0.0
    tokens: int = 0


@dataclass(frozen=True)
class AuditFinding:
    """Cached entry that differs from its recomputation without the cache.

    Attributes:
        kind: "kv" for keys and values of a block, "states" for a snapshot.
        digest: Public hash of the block, or of the block that the snapshot is at the end of.
        position: Tokens before the end of that block.
        difference: Largest difference, over the largest computed value of its layer.
        bound: Largest difference that rounding explains.
        dropped_blocks: Blocks dropped with it.
        wall_time: Seconds since the epoch.
        is_from_disk: Whether the entry had been put back from disk.
    """

    kind: str
    digest: str
    position: int
    difference: float
    bound: float
    dropped_blocks: int
    wall_time: float
    is_from_disk: bool = False

    def shown(self) -> dict[str, object]:
        """Return the values by name, for JSON; a difference that is not finite is null."""
        difference = self.difference if math.isfinite(self.difference) else None
        return dataclasses.asdict(self) | {"difference": difference}


@dataclass
class CacheAudit:
    """Audits of one scheduler's hits.

    Args:
        scheduler: Scheduler whose hits are audited; its limits say how many.

    Attributes:
        counts: Counts since the engine started.
        findings: Last findings.
    """

    scheduler: Scheduler
    counts: AuditCounts = field(default_factory=AuditCounts)
    findings: deque[AuditFinding] = field(default_factory=lambda: deque(maxlen=MAX_FINDINGS))
    _due: deque[tuple[tuple[int, ...], AuditTarget]] = field(default_factory=deque)  # hits, with their tokens
    _current: Request | None = None
    _hits: int = 0
    _names: Iterator[int] = field(default_factory=lambda: count(-1, -1))

    @property
    def has_work(self) -> bool:
        """True if an audit is under way, or could begin now."""
        return self._current is not None or self._may_begin

    def note_admission(self, admission: Admission) -> None:
        """Note a hit; every `audit_interval`-th one is due."""
        if admission.chunk.start == 0 or not admission.matched:  # a fork has used no cached entry
            return
        self._hits += 1
        if self._hits % self.scheduler.limits.audit_interval == 0:
            self._add(admission)

    def _add(self, admission: Admission) -> None:
        size, request = self.scheduler.limits.block_size, admission.request
        end = len(admission.matched) * size
        self.counts.due += 1
        if len(admission.matched) > self.scheduler.limits.total_blocks // 2:
            self.counts.left_out_memory += 1
            return
        if len(self._due) == MAX_DUE:
            self._due.popleft()
            self.counts.left_out_busy += 1
        resume = 0 if admission.restore is None else admission.chunk.start
        hashes = tuple(request.block_hashes[: len(admission.matched)])
        self._due.append((tuple(request.tokens[:end]), AuditTarget(hashes, resume)))

    def begin(self) -> None:
        """Begin the next audit if there is time; end the present one if others wait and the share is spent."""
        if self._current is not None:
            if self._is_alone or self._is_within_share(0):
                return
            self._end(self._current)
            self.counts.left_out_busy += 1
        while self._may_begin:
            tokens, target = self._due.popleft()
            if not self.scheduler.cache.match(target.block_hashes[:1]):
                self.counts.left_out_evicted += 1
                continue
            name = next(self._names)
            self._current = Request(name, RequestInputs(tokens, _PARAMS), arrival=_LAST - name, seed=0, audit=target)
            self.scheduler.add(self._current)
            return

    @property
    def _may_begin(self) -> bool:
        return bool(self._due) and (self._is_alone or self._is_within_share(len(self._due[0][0])))

    @property
    def _is_alone(self) -> bool:
        """True if no request but the audit lives."""
        return len(self.scheduler.queues) == (self._current is not None)

    def _is_within_share(self, tokens: int) -> bool:
        return self.counts.tokens + tokens <= AUDIT_SHARE * self.scheduler.counters.prefill_tokens

    def note_step(self, chunks: Sequence[Chunk], found: Differences | None, seconds: float) -> None:
        """Count the current audit's part of a step that was just committed, and judge its comparison.

        Args:
            chunks: Chunks of the step.
            found: Differences from cached entries; None if the step has no chunk of an audit.
            seconds: Time to compute the step.
        """
        audit = self._current
        if audit is None:
            return
        tokens = sum(chunk.length for chunk in chunks if chunk.request is audit)
        self.counts.tokens += tokens
        self.counts.seconds += seconds * tokens / sum(chunk.length for chunk in chunks)
        if found is not None:
            self._judge(audit, found)
        if audit.is_ended:
            self._current = None

    def _judge(self, audit: Request, found: Differences) -> None:
        comparison, target = found.comparison, audit.audit
        assert target is not None, "an audit has a target"
        self.counts.blocks += len(comparison.blocks)
        self.counts.snapshots += found.states is not None
        wrong = next((i for i, one in enumerate(found.blocks, comparison.first) if one > found.bound), None)
        if wrong is not None:
            self.counts.wrong_blocks += 1
            self._report(
                "kv", audit, target.block_hashes[wrong], wrong + 1, found.blocks[wrong - comparison.first], found
            )
        elif found.states is not None and found.states > found.bound:
            self.counts.wrong_snapshots += 1
            block = target.resume // self.scheduler.limits.block_size
            self._report("states", audit, target.block_hashes[block - 1], block, found.states, found)
        elif audit.is_ended:
            self.counts.completed += 1
            self._current = None
        elif not comparison.are_all_cached:
            self._end(audit)
            self.counts.left_out_evicted += 1

    def _report(
        self, kind: str, audit: Request, block_hash: BlockHash, blocks: int, difference: float, found: Differences
    ) -> None:
        """End an audit that found a wrong entry: drop the entry and all that depends on it, then log a warning.

        The log line comes after the last of these entries is gone, on disk too.
        """
        self._end(audit)
        is_from_disk = self.scheduler.cache.origins.has(block_hash, is_snapshot=kind == "states")
        dropped = self.scheduler.quarantine(block_hash, states_only=kind == "states")
        self.counts.dropped_blocks += dropped
        position = blocks * self.scheduler.limits.block_size
        digest = public_hash(block_hash)
        finding = AuditFinding(kind, digest, position, difference, found.bound, dropped, time.time(), is_from_disk)
        self.findings.append(finding)
        logger.error(
            "an audit of the prefix cache found wrong %s at token %d (block hash %s): the largest difference is %.3g "
            "of the layer's largest value, the bound %.3g; %d blocks are dropped, and requests that use them start "
            "again. Possible causes: %s",
            "keys or values" if kind == "kv" else "states",
            position,
            finding.digest,
            difference,
            found.bound,
            dropped,
            "a fault of the disk, faulty memory" if is_from_disk else "faulty memory, a defect of an operator",
        )

    def _end(self, audit: Request) -> None:
        if not audit.is_ended:
            self.scheduler.end(audit, Outcome(Status.ABORTED))
        self._current = None

    def forget(self) -> None:
        """Drop all audits, because the entries are gone."""
        self.counts.left_out_evicted += len(self._due) + (self._current is not None)
        self._due.clear()
        if self._current is not None:
            self._end(self._current)
