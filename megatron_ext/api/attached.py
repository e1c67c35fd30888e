"""Engine around a caller's model, as `attach_engine` returns it: on the first rank, and on the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from megatron_ext.api.engine import LoadedEngine
from megatron_ext.errors import ConfigError, EngineClosed
from megatron_ext.models.update.naming import Naming
from megatron_ext.parallel.worker import Worker


class AttachedEngine(LoadedEngine):
    """Engine around a caller's model on the first rank; see `LoadedEngine`.

    `suspend` frees the pools, and the `follow()` of the other ranks returns; after `resume` they call it again.
    """

    def _names(self) -> Naming:
        raise ConfigError("the weights are those of the attached model; write them there, in place")


class EngineFollower:
    """Part of an attached engine on a rank other than the first.

    Args:
        worker: Repeats the steps of the first rank.
        on_close: Called once, at the end.
    """

    def __init__(self, worker: Worker, on_close: Callable[[], None]) -> None:
        self._worker = worker
        self._on_close = on_close
        self._is_closed = False
        self._is_released = False  # as the first rank's engine is suspended

    @property
    def is_closed(self) -> bool:
        """True if the first rank or this one has closed the engine."""
        return self._is_closed

    def follow(self) -> None:
        """Take part in the steps until the first rank suspends or closes the engine.

        Raises:
            EngineClosed: The engine is closed.
            RankError: A rank has failed or does not answer.
        """
        if self._is_closed:
            raise EngineClosed("the engine is closed; attach a new one")
        is_over = self._worker.follow()
        self._is_released = True
        if is_over:
            self._free()

    def close(self) -> None:
        """Free this rank's resources, after the first rank has suspended or closed the engine; then do nothing.

        Raises:
            RankError: A rank has failed or does not answer.
        """
        if not self._is_closed and not self._is_released:
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
