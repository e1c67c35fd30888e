"""Engine around a caller's model on the first rank, and the part of such an engine on the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from megatron_ext.api.engine import LoadedEngine
from megatron_ext.errors import ConfigError, EngineClosed, WeightUpdateError
from megatron_ext.models.update.named_tensors import NamedTensors
from megatron_ext.models.update.shards import ShardOptions
from megatron_ext.models.update.writer import WeightWriter
from megatron_ext.parallel.commands import Action
from megatron_ext.parallel.worker import Worker


class AttachedEngine(LoadedEngine):
    """Engine around a caller's model on the first rank; see `LoadedEngine`.

    `suspend` frees the pools, and the `follow()` of the other ranks returns; after `resume` they call it again.
    """


class EngineFollower:
    """Part of an engine on a rank other than the first, as `attach_engine` and `load_follower` return it.

    Args:
        worker: Repeats the steps of the first rank.
        weight_writer: Writer of this rank's part of the weights.
        on_close: Called once, at the end.
    """

    def __init__(self, worker: Worker, weight_writer: WeightWriter, on_close: Callable[[], None]) -> None:
        self._worker = worker
        self._weight_writer = weight_writer
        self._on_close = on_close
        self._is_closed = False
        self._is_awaited = False  # the first rank waits for this one's shards

    @property
    def is_closed(self) -> bool:
        """True if the first rank or this one has closed the engine."""
        return self._is_closed

    def follow(self) -> None:
        """Take part in the steps until the first rank suspends or closes the engine, or updates weights from shards.

        Raises:
            EngineClosed: The engine is closed.
            ConfigError: The first rank waits for this rank's shards.
            RankError: A rank has failed or does not answer.
        """
        if self._is_closed:
            raise EngineClosed("the engine is closed; attach or load a new one")
        if self._is_awaited:
            raise ConfigError(
                "the first rank is in update_weights_from_shards, and waits for this rank's; call it here, too"
            )
        action = self._worker.follow()
        self._is_awaited = action is Action.HAND_OVER
        if action is Action.STOP:
            self._free()

    def update_weights_from_shards(
        self,
        named_shards: NamedTensors,
        *,
        partial: bool = False,
        in_flight: str = "recompute",
        weights_version: int | None = None,
        keep_old: bool = False,
    ) -> None:
        """Write this rank's shards of new weights, in the call that all ranks make together.

        Before that this rank takes part in the steps until the first one updates its weights. See
        `LoadedEngine.update_weights_from_shards` for arguments and errors.

        Raises:
            EngineClosed: The engine is closed.
        """
        while not self._is_awaited:
            self.follow()
            if self._is_closed:
                raise EngineClosed("the first rank has closed the engine; attach or load a new one")
        self._is_awaited = False
        options = ShardOptions(partial, in_flight, weights_version, keep_old)
        try:
            self._weight_writer.write_shards(named_shards, options)
        except (ConfigError, WeightUpdateError):
            self._worker.follow()
            raise
        self._worker.follow()

    def close(self) -> None:
        """Free this rank's resources, after the first rank has suspended or closed the engine; then do nothing.

        Raises:
            RankError: A rank has failed or does not answer.
        """
        if not self._is_closed and not self._worker.is_suspended:
            self.follow()
        self._free()

    def _free(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._worker.free()
            self._on_close()

    def __enter__(self) -> EngineFollower:
        """Return the object itself, which is closed when the block ends; after an error without waiting."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._free()
