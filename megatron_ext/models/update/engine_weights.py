"""Weights of an engine's model, and the ways to replace them: whole tensors, the shards of all ranks, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron_ext.engine.workers import Workers
from megatron_ext.errors import ConfigError
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.update.disk import NewWeights
from megatron_ext.models.update.named_tensors import NamedTensors
from megatron_ext.models.update.naming import Naming, Shapes
from megatron_ext.models.update.ranks import RankWeights
from megatron_ext.models.update.shards import ShardWeights
from megatron_ext.models.update.weight_update import update_weights, weight_shapes
from megatron_ext.parallel.driver import driver_of


@dataclass(frozen=True)
class EngineWeights:
    """Writer of weights on the first rank, made before the engine packs them; it writes between two steps.

    Attributes:
        loaded: This rank's part of the model.
        shards: Writer of the shards that each rank has.
        naming: Tensor names of the format that the model was loaded from; None for a model of the caller.
        ranks: Updates that all ranks make together; None for a world of one.
        read: Reads a checkpoint for a model of one rank; None for a model of the caller.
        workers: The other ranks; set by the engine.
    """

    loaded: LoadedModel
    shards: ShardWeights
    naming: Naming | None = None
    ranks: RankWeights | None = None
    read: Callable[[Path], NewWeights] | None = None
    workers: Workers = field(default_factory=Workers)

    def names(self) -> Naming:
        """Return the names of whole tensors.

        Raises:
            ConfigError: The model is the caller's.
        """
        if self.naming is None:
            raise ConfigError(
                "the weights are those of the attached model; write them there, in place, or give each rank's part to "
                "update_weights_from_shards"
            )
        return self.naming

    def shapes(self) -> Shapes:
        """Return the names and shapes of all whole tensors."""
        if self.ranks is not None:
            return self.ranks.shapes(driver_of(self.workers).tell)
        return weight_shapes(self.loaded.model, self.names())

    def write(self, tensors: NamedTensors, *, partial: bool, keep_old: bool) -> None:
        """Write whole tensors; arguments and errors are those of `LoadedEngine.update_weights`."""
        if self.ranks is None:
            update_weights(self.loaded.model, self.names(), tensors, partial=partial, keep_old=keep_old)
        else:
            self.ranks.lead(tensors, driver_of(self.workers).tell, partial=partial, keep_old=keep_old)

    def handing_over(self) -> AbstractContextManager[None]:
        """Return a context in which the other ranks are with their callers, who hand over their shards."""
        return nullcontext() if self.workers.heartbeat is None else driver_of(self.workers).handing_over()

    def reader(self, directory: Path) -> Callable[[], int]:
        """Read a checkpoint, and return a function that writes it and returns the number of tensors.

        Several ranks read when that function is called.

        Raises:
            ConfigError: See `read_new_weights`.
        """
        if self.ranks is not None:
            return partial(self.ranks.lead_checkpoint, directory, driver_of(self.workers).tell)
        assert self.read is not None, "a model of the caller is not read from checkpoints"
        return self.read(directory).write
