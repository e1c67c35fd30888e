"""Export of a server's metrics as gauges of another system, such as Ray's endpoint. Needs neither Ray nor torch.

Every sample of `/metrics` becomes a gauge of the same name with the same labels. So buckets, counts and sums are exact,
their names stay the same, and an export costs one call for each sample, however many requests there were.
Ray's counters and histograms would be one call for each event, and stay in its endpoint after their replica has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

if TYPE_CHECKING:
    from ray.serve.metrics import Gauge

logger = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds; Ray's agents collect every 10 s
_UNWANTED = "_created"


MakeGauge = Callable[[str, str, tuple[str, ...]], "Gauge"]  # of name, description and names of the labels


class MetricsExport:
    """Export of all samples.

    Args:
        collect: Returns the metrics.
        make_gauge: Makes a gauge.
        interval: Seconds between exports.
    """

    def __init__(
        self, collect: Callable[[], Iterator[Metric]], make_gauge: MakeGauge, interval: float = INTERVAL
    ) -> None:
        self._collect, self._make_gauge, self._interval = collect, make_gauge, interval
        self._gauges: dict[str, Gauge] = {}

    async def run(self) -> None:
        """Export until cancelled; a failure is logged, and the next export is tried."""
        while True:
            try:
                self.export()
            except Exception:  # the other system's: serving does not depend on it
                logger.exception("metrics were not exported")
            await asyncio.sleep(self._interval)

    def export(self) -> None:
        """Set all gauges."""
        for family in self._collect():
            for sample in family.samples:
                if not sample.name.endswith(_UNWANTED):
                    if sample.name not in self._gauges:
                        labels = tuple(sample.labels)
                        self._gauges[sample.name] = self._make_gauge(sample.name, family.documentation, labels)
                    self._gauges[sample.name].set(
                        sample.value, {name: str(value) for name, value in sample.labels.items()}
                    )
