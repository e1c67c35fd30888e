"""Who computes the steps that an engine plans."""

from __future__ import annotations

from typing import Protocol

from megatron_ext.engine.result import StepResult
from megatron_ext.scheduling.step import ScheduledStep


class Executor(Protocol):
    """Computes steps, one at a time, from their messages alone."""

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute a step, snapshots included. If anything raises, nothing of it counts."""

    def idle(self) -> None:
        """A step without anything to compute; ranks that share experts take part in what others compute."""
