"""Weight updates of a running server: read while the engine steps, written between two steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_ext.config.in_flight import InFlight
from megatron_ext.models.identity import weights_hash
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.models.update.disk import WeightsRoot
from megatron_ext.server.log import printable

logger = logging.getLogger(__name__)

LONGEST_PATH = 500  # characters of a path in a log line


@dataclass(eq=False)
class WeightsUpdater:
    """Reader of checkpoints below a directory into the model, one at a time.

    Args:
        root: Directory of the checkpoints; nothing outside is read.
        engine: Engine of the model, with a writer of weights.

    Attributes:
        weights_hash: Hash of the weights that were written last; empty before the first update.
    """

    root: WeightsRoot
    engine: LLMEngine
    weights_hash: str = ""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def update(self, path: str, in_flight: InFlight = InFlight.RECOMPUTE, version: int | None = None) -> int:
        """Read a checkpoint, and write it if it fits.

        Args:
            path: Path of the checkpoint's directory, below the root.
            in_flight: Treatment of requests in flight.
            version: Number of the new weights; one more than the last if missing.

        Returns:
            Number of tensors written.

        Raises:
            ConfigError: See `WeightsRoot.resolve` and `read_new_weights`. Nothing has been written.
        """
        async with self._one_at_a_time:
            write, found = await asyncio.to_thread(self._read, path)
            count = await asyncio.wrap_future(self.engine.change_weights(write, in_flight, version))
            self.weights_hash = found
        logger.info("weights are now from %s", printable(path, LONGEST_PATH))
        return count

    def _read(self, path: str) -> tuple[Callable[[], int], str]:
        """Return a function that writes the weights, and their hash."""
        directory = self.root.resolve(path)
        found = weights_hash(directory)
        return self.engine.weight_writer.read_checkpoint(directory), found
