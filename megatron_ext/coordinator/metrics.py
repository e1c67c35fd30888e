"""Prometheus metrics of a fleet. Their names are an interface; docs/fleet.md explains them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import megatron_ext
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.coordinator.supervision import Supervisor
from megatron_ext.routing.router import Decision

PREFIX = "megatron_ext_coordinator"
_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 1e-2, 0.1)
_REPLICA = "replica"


class FleetMetrics(Collector):
    """All metrics of one coordinator. Series of a replica are removed with the replica.

    Args:
        fleet: Fleet to be measured.
        supervisor: Supervisor of the coordinator's tasks.
    """

    def __init__(self, fleet: Fleet, supervisor: Supervisor) -> None:
        self._fleet = fleet
        self._supervisor = supervisor
        self._registry = registry = CollectorRegistry()
        self._taken: dict[str, tuple[int, float]] = {}  # decisions and their seconds, by replica
        self._decisions = Histogram(
            f"{PREFIX}_decision_seconds",
            "Time to choose a replica, by the chosen replica",
            [_REPLICA],
            buckets=_SECONDS,
            registry=registry,
        )
        self._chosen = Counter(
            f"{PREFIX}_decisions", "Reasons for the choice of a replica", [_REPLICA, "reason"], registry=registry
        )
        self._moved = Counter(
            f"{PREFIX}_requests_moved",
            "Requests that a replica did not answer: lost, failed, full, invalid, or broken (a stream that had begun)",
            [_REPLICA, "reason"],
            registry=registry,
        )
        self._event_faults = Counter(
            f"{PREFIX}_event_faults",
            "KV events of a replica that were not valid, were not replayed, or failed the reader",
            [_REPLICA],
            registry=registry,
        )
        self.rejected = Counter(
            f"{PREFIX}_requests_rejected", "Responses 429 because all replicas were full", registry=registry
        )
        Info(PREFIX, "The coordinator", registry=registry).info({"version": megatron_ext.__version__})
        registry.register(self)

    def decided(self, decision: Decision, seconds: float) -> None:
        """Record a routing decision."""
        self._decisions.labels(decision.replica).observe(seconds)
        count, total = self._taken.get(decision.replica, (0, 0.0))
        self._taken[decision.replica] = count + 1, total + seconds
        self._chosen.labels(decision.replica, decision.reason.value).inc()

    def moved(self, url: str, reason: str) -> None:
        """Count a request that a replica did not answer, unless the replica has been removed."""
        if url in self._fleet.members:
            self._moved.labels(url, reason).inc()

    def event_fault(self, url: str) -> None:
        """Count a fault of a replica's KV events, unless the replica has been removed."""
        if url in self._fleet.members:
            self._event_faults.labels(url).inc()

    def decision_seconds(self, url: str) -> float | None:
        """Return the mean seconds of decisions for this replica; None without decisions."""
        count, seconds = self._taken.get(url, (0, 0.0))
        return seconds / count if count else None

    def forget(self, url: str) -> None:
        """Remove the series of a replica."""
        self._taken.pop(url, None)
        for metric in (self._decisions, self._chosen, self._moved, self._event_faults):
            labels = [one.labels for family in metric.collect() for one in family.samples]
            reasons = {one.get("reason") for one in labels if one.get(_REPLICA) == url}
            for reason in reasons:
                metric.remove(url, *(() if reason is None else (reason,)))

    def collect(self) -> Iterator[Metric]:
        """Yield gauges of the replicas' current state."""
        views = {view.name: view for view in self._fleet.router.replicas()}
        up = GaugeMetricFamily(f"{PREFIX}_replica_ready", "1 if the replica accepts requests", labels=[_REPLICA])
        flying = GaugeMetricFamily(f"{PREFIX}_in_flight", "Requests in flight to the replica", labels=[_REPLICA])
        load = GaugeMetricFamily(
            f"{PREFIX}_load_tokens", "Tokens that the replica has yet to compute", labels=[_REPLICA]
        )
        blocks = GaugeMetricFamily(
            f"{PREFIX}_blocks_known", "KV blocks that the replica is known to hold", labels=[_REPLICA]
        )
        sent = CounterMetricFamily(f"{PREFIX}_requests_sent", "Requests sent to the replica", labels=[_REPLICA])
        skipped = CounterMetricFamily(
            f"{PREFIX}_prompt_tokens_skipped", "Prompt tokens that the replica did not compute", labels=[_REPLICA]
        )
        computed = CounterMetricFamily(
            f"{PREFIX}_prompt_tokens_computed", "Prompt tokens that the replica computed", labels=[_REPLICA]
        )
        refused = CounterMetricFamily(
            f"{PREFIX}_answers_refused", "Answers of the replica that were not valid", labels=[_REPLICA]
        )
        weights = GaugeMetricFamily(
            f"{PREFIX}_weights_version", "Number of the weights that the replica has", labels=[_REPLICA]
        )
        restarts = CounterMetricFamily(
            f"{PREFIX}_task_restarts", "Tasks of the coordinator that failed and were started again", labels=["task"]
        )
        for kind, count in self._supervisor.restarts.items():
            restarts.add_metric([kind], count)
        for url, member in self._fleet.members.items():
            view, beat = views.get(url), member.beat
            up.add_metric([url], float(member.status is Status.READY))
            flying.add_metric([url], len(member.calls))
            load.add_metric([url], 0 if view is None else view.load)
            blocks.add_metric([url], 0 if view is None else view.blocks)
            sent.add_metric([url], member.sent)
            refused.add_metric([url], member.refused)
            if beat is not None and beat.weights_version is not None:
                weights.add_metric([url], beat.weights_version)
            if beat is not None and beat.skipped is not None and beat.computed is not None:
                skipped.add_metric([url], beat.skipped)
                computed.add_metric([url], beat.computed)
        yield from (up, flying, load, blocks, sent, refused, restarts, weights, skipped, computed)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
