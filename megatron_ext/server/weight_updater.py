"""Weight updates of a running server: read while the engine steps, written between two steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from megatron_ext.config import SourceConfig
from megatron_ext.config.annotations import FieldValues
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

    async def update(self, path: str, engine: InferenceEngine, between_steps: Callable[..., Awaitable[None]]) -> int:
        """Read a checkpoint, and write it if it fits.

        Args:
            path: Path of the checkpoint's directory, below the root.
            engine: Engine of the model.
            between_steps: Calls a function in the engine's thread.

        Returns:
            Number of tensors written.

        Raises:
            ConfigError: See `WeightsRoot.resolve` and `read_new_weights`. Nothing has been written.
        """
        async with self._one_at_a_time:
            new, version = await asyncio.to_thread(self._read, path)
            await between_steps(_write, new, engine)
            self.version = version
        logger.info("weights are now from %s", printable(path, LONGEST_PATH))
        return len(new.tensors)

    def _read(self, path: str) -> tuple[NewWeights, str]:
        directory = self.root.resolve(path)
        new = read_new_weights(self.loaded, self.source, self.overrides, directory)
        return new, weights_version(directory)


def _write(new: NewWeights, engine: InferenceEngine) -> None:
    """Write the weights. Requests in flight continue on their old KV and states, which are no longer cached."""
    new.write()
    engine.weights_changed()
