"""Metrics of the last ten minutes, for a status page that is opened late."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping

from megatron_ext.server.monitoring.metrics import Metrics

INTERVAL = 2.0  # seconds
KEPT = 300  # samples: ten minutes

Sample = Mapping[str, float]  # a metric's name as in `/metrics`, without the prefix, with its labels: its value


class History:
    """Samples of all metrics, and the times at which they were taken.

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
