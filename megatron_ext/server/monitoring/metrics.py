"""Prometheus metrics, and their history of ten minutes. Names are an interface; the reference shows their help."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import megatron_ext
from megatron_ext.engine.statistics import EngineStatistics
from megatron_ext.prefix_cache.disk.store_use import REASONS
from megatron_ext.scheduling.explanation import Explanation, Reason
from megatron_ext.scheduling.record import RequestRecord, Status

PREFIX = "megatron_ext"
_DRAWN_BUCKETS = f"{PREFIX}_time_to_first_token_seconds"
_UNDRAWN = ("_created", "_sum")
OUTCOMES = ("stop", "length", "failed", "aborted")
SOURCES = ("memory", "disk")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

DEPTHS = (64, 256, 1024, 4096, 16384)  # tokens that agree: a date near the top of a prompt is seen at once

# name, help, where the value is
_GAUGES = (
    ("requests_running", "Requests in the batch", "running"),
    ("requests_waiting", "Requests that wait for admission", "waiting"),
    ("requests_paused", "Requests without a block for their next token", "paused"),
    ("kv_blocks", "KV blocks that there is room for; with slabs, at this moment", "use.blocks_total"),
    ("kv_blocks_in_use", "KV blocks referenced by requests", "use.blocks_in_use"),
    ("kv_blocks_cached", "KV blocks that can be found by their contents, in use or not", "use.blocks_cached"),
    ("kv_blocks_evictable", "Cached KV blocks that no request uses", "use.blocks_evictable"),
    ("prefix_cache_bytes", "Bytes of cached KV blocks and snapshots in memory, on all ranks", "cached_bytes"),
    ("state_slots", "Slots for snapshots of recurrent states; with slabs, at this moment", "use.slots_total"),
    ("slabs", "Slabs that blocks and snapshots share; 0 if each have their own memory", "use.slabs_total"),
    ("slabs_of_blocks", "Slabs that hold KV blocks", "use.slabs_of_blocks"),
    ("slabs_of_snapshots", "Slabs that hold snapshots", "use.slabs_of_snapshots"),
    ("state_slots_used", "Slots with a snapshot that is not opportunistic", "use.slots_used"),
    (
        "state_slots_provisional",
        "Slots with an opportunistic snapshot, which gives way to any other",
        "use.provisional_slots",
    ),
)
_COUNTERS = (
    ("prefix_cache_hits", "Admissions that skipped prompt tokens", "counters.hits"),
    ("prefix_cache_blocks_matched", "KV blocks found in the cache", "counters.blocks_matched"),
    (
        "coordination_waits",
        "Requests that waited for another request's prefix, or for the end of another sample's prefill",
        "counters.coordination_waits",
    ),
    ("overtakes", "Admissions before requests that arrived earlier, under lpm", "counters.overtakes"),
    ("kv_blocks_evicted", "Cached KV blocks evicted for memory", "use.blocks_evicted"),
    ("snapshots_taken", "Snapshots of recurrent states taken", "use.snapshots_taken"),
    ("snapshots_skipped", "Snapshots not taken for lack of a slot", "use.snapshots_skipped"),
    ("snapshots_evicted", "Snapshots evicted for lack of a slot", "use.slots_evicted"),
    ("snapshots_replaced", "Snapshots of decode replaced by the next one of their request", "use.snapshots_replaced"),
    ("slabs_retyped", "Slabs that changed between blocks and snapshots", "use.slabs_retyped"),
    ("kv_blocks_moved", "KV blocks moved to free a slab", "use.blocks_moved"),
    ("provisional_taken", "Opportunistic snapshots taken", "use.provisional_taken"),
    ("provisional_consumed", "Opportunistic snapshots that a request resumed from", "use.provisional_consumed"),
    (
        "provisional_given_up",
        "Opportunistic snapshots evicted before any request used them",
        "use.provisional_given_up",
    ),
    (
        "prompt_tokens_lost_slots",
        "Prompt tokens that had been cached, and that more snapshot slots would have saved",
        "counters.lost_slot_tokens",
    ),
    (
        "prompt_tokens_lost_blocks",
        "Prompt tokens that had been cached, and that more KV blocks would have saved in addition to more slots",
        "counters.lost_block_tokens",
    ),
    ("draft_tokens", "Draft tokens verified", "counters.drafted"),
    ("accepted_draft_tokens", "Draft tokens accepted", "counters.accepted"),
    ("request_pauses", "Requests paused for lack of a block", "counters.pauses"),
    ("request_evictions", "Paused requests that were preempted and lost their blocks", "counters.preemptions"),
    (
        "steps_launched_ahead",
        "Steps launched before the tokens of the previous step were known",
        "counters.launched_ahead",
    ),
)
# of audits of the prefix cache, if there are any
_AUDIT_COUNTERS = (
    ("audits_due", "Hits due for an audit: each N-th, by --prefix-cache-audit N", "audit.due"),
    ("audits_completed", "Audits that compared all entries of their hit", "audit.completed"),
    ("audits_left_out_busy", "Hits not audited, for want of time", "audit.left_out_busy"),
    ("audits_left_out_evicted", "Hits not audited because their entries were evicted", "audit.left_out_evicted"),
    ("audits_left_out_memory", "Hits not audited because an audit would take too many blocks", "audit.left_out_memory"),
    ("audit_tokens", "Tokens that audits computed", "audit.tokens"),
    ("audited_blocks", "Blocks that audits compared", "audit.blocks"),
    ("audited_snapshots", "Snapshots that audits compared", "audit.snapshots"),
    ("audit_wrong_blocks", "Audits that found a wrong block", "audit.wrong_blocks"),
    ("audit_wrong_snapshots", "Audits that found a wrong snapshot", "audit.wrong_snapshots"),
    ("audit_dropped_blocks", "Blocks dropped because an audit found a wrong entry", "audit.dropped_blocks"),
)
# of the entries on disk, if there is a directory: name, help, key in `prefix_cache_disk`
_DISK_GAUGES = (
    ("on", "1 while the directory is in use, 0 after it has failed", "is_on"),
    ("blocks", "KV blocks on disk", "blocks"),
    ("snapshots", "Snapshots of recurrent states on disk", "snapshots"),
    ("bytes", "Bytes of KV blocks and snapshots on disk", "bytes"),
    ("limit_bytes", "Limit of the bytes on disk", "limit_bytes"),
    ("other_entries", "Entries on disk of other models or settings", "other_entries"),
)
_DISK_COUNTERS = (
    ("hits", "Admissions that skipped prompt tokens because of entries put back from disk", "hits"),
    ("entries_loaded", "Entries put back into memory at the start", "loaded"),
    ("entries_read", "Entries read from disk", "read"),
    ("entries_written", "Entries written to disk", "written"),
    ("entries_left_out", "Entries not written for want of time or room", "left_out"),
    ("read_bytes", "Bytes read from disk", "read_bytes"),
    ("written_bytes", "Bytes written to disk", "written_bytes"),
    ("read_seconds", "Time of reads from disk", "read_seconds"),
    ("write_seconds", "Time of writes to disk, syncs included", "write_seconds"),
)
# of what leaves memory for the disk and comes back
_TIER_COUNTERS = (
    ("entries_evicted", "Entries given to the disk as they left memory", "evicted"),
    ("loads", "Loads from disk begun for waiting requests", "loads"),
    ("loads_slower", "Loads not begun, since computing was estimated to be quicker", "loads_slower"),
    ("load_waits", "Requests that waited for loads", "load_waits"),
    ("load_bytes", "Bytes of the loads that were read", "load_bytes"),
    ("load_seconds", "Time of reading the loads from disk", "load_seconds"),
)
_LOAD_OUTCOMES = ("placed", "failed", "late", "useless")
INTERVAL = 2.0  # seconds
KEPT = 300  # samples: ten minutes
Sample = Mapping[str, float]  # a metric's name as in `/metrics`, without the prefix, with its labels: its value


class Metrics(Collector):
    """All metrics of one server.

    Request metrics are counted when a request ends; engine metrics are read between two steps.

    Args:
        model: Name that the model is served under.
    """

    def __init__(self, model: str) -> None:
        self.state: EngineStatistics | None = None
        self._registry = registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests that have ended, by outcome", "outcome")
        self.rejected = self._counter("requests_rejected", "Requests rejected because the queue was full")
        self._skipped = self._counter("prompt_tokens_skipped", "Prompt tokens that no layer computed")
        self._sources = self._counter(
            "prompt_tokens_skipped_by_source",
            "Prompt tokens skipped, by source: memory (computed by this process) or disk (put back from there)",
            "source",
        )
        self._computed = self._counter("prompt_tokens_computed", "Prompt tokens computed, by reason", "reason")
        self._why = self._counter(
            "prefix_cache_explanations",
            "Requests by the reason why they skipped no more, with --explain-prefix-cache",
            "reason",
        )
        self._near_misses = self._counter(
            "prefix_cache_near_misses",
            "Requests that skipped less than possible, by reason and by depth, the tokens that agree with the nearest "
            "cached prefix; with --explain-prefix-cache",
            *("reason", "depth"),
        )
        self._recomputed = self._counter(
            "tokens_recomputed", "Tokens prefilled again after an eviction or a failed step"
        )
        self._generated = self._counter("tokens_generated", "Tokens generated")
        self.step_failures = self._counter(
            "step_failures", "Engine steps that raised; after three in a row the requests are given up"
        )
        self._first_token = self._histogram("time_to_first_token_seconds", "Time from submission to the first token")
        self.inter_token = self._histogram("inter_token_seconds", "Time from one token of a request to its next")
        self._latency = self._histogram("request_seconds", "Time from submission to the end")
        Info(PREFIX, "The server", registry=registry).info({"version": megatron_ext.__version__, "model": model})
        for outcome in OUTCOMES:  # zero is a value too
            self._requests.labels(outcome)
        for reason in Reason:
            self._computed.labels(reason.value)
        for source in SOURCES:
            self._sources.labels(source)
        registry.register(self)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, buckets=_SECONDS, registry=self._registry)

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        completed = record.status is Status.COMPLETED
        self._requests.labels(record.finish_reason if completed else record.status.name.lower()).inc()
        skipped, from_disk = record.skipped_prefill_token_count, record.skipped_from_disk_token_count
        self._skipped.inc(skipped)
        for source, tokens in zip(SOURCES, (skipped - from_disk, from_disk), strict=True):
            self._sources.labels(source).inc(tokens)
        for reason, count in record.prefill_reasons.items():
            self._computed.labels(reason).inc(count)
        if record.prefix_cache_explanation is not None:
            self.observe_explanation(record.prefix_cache_explanation)
        self._recomputed.inc(record.recomputed_token_count)
        self._generated.inc(len(record.generated_tokens))
        if record.ttft is not None:
            self._first_token.observe(record.ttft)
        self._latency.observe(record.latency)

    def observe_explanation(self, explanation: Explanation) -> None:
        """Count why a request skipped no more."""
        self._why.labels(explanation.reason).inc()
        if explanation.is_near_miss:
            self._near_misses.labels(explanation.reason, depth_of(explanation.depth)).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine's state."""
        state = self.state
        if state is None:
            return
        for name, text, path in _GAUGES:
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, state.value(path))
        for name, text, path in (*_COUNTERS, *(_AUDIT_COUNTERS if state.audit is not None else ())):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, state.value(path))
        if state.audit is not None:
            text = "Time of steps, in proportion to the tokens that audits had in them"
            yield CounterMetricFamily(f"{PREFIX}_audit_seconds", text, state.audit.seconds)
        yield from _disk_metrics(state.prefix_cache_disk() or {})
        use = state.speculation
        if use is not None:
            yield _by_position("draft_tokens_by_position", "Draft tokens verified", use.drafted)
            yield _by_position("accepted_draft_tokens_by_position", "Draft tokens accepted", use.accepted)

    def values(self) -> dict[str, float]:
        """Return the samples of `/metrics` by name, without the prefix, and labels: `requests_total{outcome="stop"}`.

        Informational metrics are left out, and so are the sums and buckets that the status page does not draw.
        """
        return {
            _key(sample.name, sample.labels): sample.value
            for family in self._registry.collect()
            if family.type != "info"
            for sample in family.samples
            if not sample.name.endswith(_UNDRAWN)
            and ("le" not in sample.labels or sample.name.startswith(_DRAWN_BUCKETS))
        }

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _disk_metrics(counts: Mapping[str, object]) -> Iterator[Metric]:
    """Yield the metrics of the entries on disk; none without a directory."""
    if not counts:
        return
    for name, text, key in _DISK_GAUGES:
        yield GaugeMetricFamily(f"{PREFIX}_prefix_cache_disk_{name}", text, _number(counts[key]))
    for name, text, key in _DISK_COUNTERS:
        yield CounterMetricFamily(f"{PREFIX}_prefix_cache_disk_{name}", text, _number(counts[key]))
    if "loads" in counts:
        for name, text, key in _TIER_COUNTERS:
            yield CounterMetricFamily(f"{PREFIX}_prefix_cache_disk_{name}", text, _number(counts[key]))
        text = (
            "Ends of loads from disk, by outcome: placed (in memory), failed (damaged or gone), late (at the "
            "deadline), useless (no request waits any more)"
        )
        ends = {outcome: counts[f"loads_{outcome}"] for outcome in _LOAD_OUTCOMES}
        yield _labelled("prefix_cache_disk_load_ends", text, "outcome", ends)
    drops = counts["drops"]
    assert isinstance(drops, Mapping), "counts by reason"
    by_reason = {reason: drops.get(reason, 0) for reason in REASONS}
    yield _labelled("prefix_cache_disk_drops", "Entries dropped, or not written, by reason", "reason", by_reason)


def _number(value: object) -> float:
    assert isinstance(value, int | float), f"{value} is not a number"
    return value


def _by_position(name: str, text: str, counts: Sequence[int]) -> CounterMetricFamily:
    """Return a counter for each position after the last known token; the first position is 1."""
    return _labelled(name, f"{text}, by position", "position", dict(enumerate(counts, start=1)))


def _labelled(name: str, text: str, label: str, counts: Mapping[Any, object]) -> CounterMetricFamily:
    """Return a counter for each value of a label."""
    family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([str(value)], _number(count))
    return family


def depth_of(tokens: int) -> str:
    """Return the label of a token count: the smallest of a few bounds above it."""
    bound = next((bound for bound in DEPTHS if tokens < bound), None)
    return f"{DEPTHS[-1]} or more" if bound is None else f"below {bound}"


def _key(name: str, labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return name.removeprefix(f"{PREFIX}_") + (f"{{{pairs}}}" if pairs else "")


class History:
    """Samples of all metrics of the last ten minutes, with their times, for a status page that is opened late.

    Args:
        metrics: Source of the samples.
        interval: Seconds between samples.
        kept: Maximum number of samples; the oldest are dropped.
    """

    def __init__(self, metrics: Metrics, interval: float = INTERVAL, kept: int = KEPT) -> None:
        self._metrics = metrics
        self._interval = interval
        self._samples: deque[tuple[float, Sample]] = deque(maxlen=kept)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(self._interval)

    def sample(self) -> None:
        """Take one sample."""
        self._samples.append((time.time(), self._metrics.values()))

    def since(self, moment: float) -> dict[str, object]:
        """Return the samples after a moment, the oldest first, followed by the current values.

        Args:
            moment: Seconds since 1970, by the server's clock.

        Returns:
            interval: seconds between samples; kept: maximum number of samples; times: of the samples; series: the
                values of each metric at these times, null before the metric existed.
        """
        samples = [one for one in self._samples if one[0] > moment]
        samples.append((time.time(), self._metrics.values()))
        latest = samples[-1][1]
        return {
            "interval": self._interval,
            "kept": self._samples.maxlen,
            "times": [round(taken, 3) for taken, _ in samples],
            "series": {name: [values.get(name) for _, values in samples] for name in latest},
        }
