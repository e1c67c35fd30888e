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
from megatron_ext.models.identity import weights_version
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.update.disk import NewWeights, WeightsRoot, read_new_weights
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

    Attributes:
        version: Version of the weights that were written last; empty before the first update.
    """

    root: WeightsRoot
    loaded: LoadedModel
    source: SourceConfig
    overrides: FieldValues
    version: str = ""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def update(
        self,
        path: str,
        engine: InferenceEngine,
        change_weights: Callable[[InFlight, Callable[[], None]], Awaitable[None]],
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
            new, content = await asyncio.to_thread(self._read, path)
            await change_weights(in_flight, partial(_write, new, engine, in_flight, version))
            self.version = content
        logger.info("weights are now from %s", printable(path, LONGEST_PATH))
        return len(new.tensors)

    def _read(self, path: str) -> tuple[NewWeights, str]:
        directory = self.root.resolve(path)
        new = read_new_weights(self.loaded, self.source, self.overrides, directory)
        return new, weights_version(directory)


def _write(new: NewWeights, engine: InferenceEngine, in_flight: InFlight, version: int | None) -> None:
    engine.core.land()
    try:
        new.write()
    except WeightUpdateError as error:
        engine.core.weights_failed(error)
        raise
    engine.core.weights_changed(in_flight, version)
