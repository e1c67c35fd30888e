"""Weight updates of a running server: read while the engine steps, written between two steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from megatron_ext.config import SourceConfig
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.in_flight import InFlight
from megatron_ext.errors import WeightUpdateError
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.models.identity import weights_hash
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.update.disk import WeightsRoot, read_new_weights
from megatron_ext.models.update.ranks import RankWeights
from megatron_ext.parallel.driver import driver_of
from megatron_ext.server.log import printable

logger = logging.getLogger(__name__)

LONGEST_PATH = 500  # characters of a path in a log line


@dataclass(eq=False)
class WeightsUpdater:
    """Reader of checkpoints below a directory into the model, one at a time.

    Args:
        root: Directory of the checkpoints; nothing outside is read.
        loaded: The model.
        source: Source that the model was loaded from.
        overrides: Overrides that the model was loaded with.
        ranks: Updates of the weights of all ranks; None for a world of one.

    Attributes:
        weights: Hash of the weights that were written last; empty before the first update.
    """

    root: WeightsRoot
    loaded: LoadedModel
    source: SourceConfig
    overrides: FieldValues
    ranks: RankWeights | None = None
    weights: str = ""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def update(
        self,
        path: str,
        engine: InferenceEngine,
        change_weights: Callable[[InFlight, Callable[[], int]], Awaitable[int]],
        in_flight: InFlight = InFlight.RECOMPUTE,
        version: int | None = None,
    ) -> int:
        """Read a checkpoint, and write it if it fits.

        Args:
            path: Path of the checkpoint's directory, below the root.
            engine: Engine of the model.
            change_weights: Writes the weights; see `RequestManager.change_weights`.
            in_flight: What becomes of requests in flight.
            version: Number of the new weights; one more than the last if missing.

        Returns:
            Number of tensors written.

        Raises:
            ConfigError: See `WeightsRoot.resolve` and `read_new_weights`. Nothing has been written.
        """
        async with self._one_at_a_time:
            write, found = await asyncio.to_thread(self._read, path, engine)
            count = await change_weights(in_flight, partial(_write, write, engine, in_flight, version))
            self.weights = found
        logger.info("weights are now from %s", printable(path, LONGEST_PATH))
        return count

    def _read(self, path: str, engine: InferenceEngine) -> tuple[Callable[[], int], str]:
        """Return a function that writes the weights, and their hash; several ranks read when it is called."""
        directory = self.root.resolve(path)
        found = weights_hash(directory)
        if self.ranks is not None:
            return partial(self.ranks.lead_checkpoint, directory, driver_of(engine.core.workers).tell), found
        return read_new_weights(self.loaded, self.source, self.overrides, directory).write, found


def _write(write: Callable[[], int], engine: InferenceEngine, in_flight: InFlight, version: int | None) -> int:
    engine.core.land()
    try:
        count = write()
    except WeightUpdateError as error:
        engine.core.weights_failed(error)
        raise
    engine.core.weights_changed(in_flight, version)
    return count
