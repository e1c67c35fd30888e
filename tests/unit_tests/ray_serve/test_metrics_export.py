"""Metrics of a server as gauges of another system, with fakes of its gauges."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron_ext.ray_serve.metrics_export import MetricsExport
from megatron_ext.server.monitoring.metrics import Metrics

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class Exported:
    """Gauges that were made, and their values."""

    made: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    values: Values = field(default_factory=dict)

    def make(self, name: str, text: str, labels: tuple[str, ...]) -> FakeGauge:
        assert text
        self.made.append((name, labels))
        return FakeGauge(name, self)


@dataclass
class FakeGauge:
    name: str
    exported: Exported

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.exported.values[self.name, frozenset(tags.items())] = value


def samples(metrics: Metrics) -> Values:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_every_sample_has_a_gauge():
    """RP-6: all names and labels of `/metrics` are kept, and values follow; each gauge is made once."""
    metrics, exported = Metrics("tiny"), Exported()
    export = MetricsExport(metrics.families, exported.make)
    export.export()
    assert exported.values == samples(metrics)
    for seconds in (0.002, 0.2, 500.0):
        metrics.inter_token.observe(seconds)
    metrics.rejected.inc()
    export.export()
    assert exported.values == samples(metrics)
    assert exported.values["megatron_ext_inter_token_seconds_bucket", frozenset({("le", "0.25")})] == 2
    assert exported.values["megatron_ext_requests_rejected_total", frozenset()] == 1
    assert len(dict(exported.made)) == len(exported.made)
    assert dict(exported.made)["megatron_ext_requests_total"] == ("outcome",)


async def test_a_failure_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture):
    """RP-6: the next export is tried, and then all values are there."""
    metrics, exported = Metrics("tiny"), Exported()
    failures = iter([True])

    def make(name: str, text: str, labels: tuple[str, ...]) -> FakeGauge:
        if next(failures, False):
            raise RuntimeError("not connected")
        return exported.make(name, text, labels)

    running = asyncio.create_task(MetricsExport(metrics.families, make, interval=0.0).run())
    while exported.values != samples(metrics):
        await asyncio.sleep(0)
    running.cancel()
    assert "not connected" in caplog.text
