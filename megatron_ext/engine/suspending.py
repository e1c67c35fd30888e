"""Levels of a suspend, which differ in the treatment of the pools' memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from megatron_ext.config.batching import SuspendLevel
from megatron_ext.engine.replica import Replica
from megatron_ext.engine.resources import ModelResources
from megatron_ext.engine.workers import Workers
from megatron_ext.errors import ConfigError


class Suspension:
    """Suspends and resumes an engine core.

    Args:
        replicas: Replicas of the core.
        workers: Workers on the other ranks.
        resources: Weights and pools of the model.

    Attributes:
        level: Level at which the core is suspended; None if it is not.
    """

    def __init__(self, replicas: Sequence[Replica], workers: Workers, resources: ModelResources) -> None:
        self._replicas = replicas
        self._workers = workers
        self._resources = resources
        self.level: SuspendLevel | None = None

    def suspend(self, level: SuspendLevel | None) -> SuspendLevel:
        """Suspend the core; do nothing if it is suspended at this level.

        Args:
            level: Level; None for the present level if suspended, else the resources' default.

        Returns:
            The level.

        Raises:
            ConfigError: There is no such level, another one is in force, or it does not work with several ranks.
            RuntimeError: There is too little host memory to offload the pools. The core is not suspended.
        """
        level = level or self.level or self._resources.suspend_level
        self._check(level)
        if self.level is not None:
            return level
        for replica in self._replicas:
            if level == "drop":
                replica.suspend()
            else:
                replica.async_scheduling.synchronize()
        if level == "drop":
            self._workers.meet()
            self._workers.suspend()
            self._resources.free()
        elif level == "offload":
            self._resources.free(offloads=True)
        self.level = level
        return level

    def resume(self) -> None:
        """Allocate the pools again, unless they were kept; do nothing if the core is not suspended."""
        if self.level in ("offload", "drop"):
            self._resources.allocate()
            self._resources.capture()
        was_dropped, self.level = self.level == "drop", None
        if was_dropped:
            self._workers.resume()

    def _check(self, level: str) -> None:
        if level not in get_args(SuspendLevel):
            raise ConfigError(f"level is {level!r}, and must be keep, offload or drop")
        if self.level not in (None, level):
            raise ConfigError(
                f"the engine is suspended at level {self.level}; resume it before it is suspended at {level}"
            )
        if self._workers.heartbeat is not None and level == "offload":
            raise ConfigError("level offload works with one rank; with several keep and drop do")
