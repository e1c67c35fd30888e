"""Executor protocols: run a scheduled step and return its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_ext.engine.result import StepResult
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import ScheduledStep


class Executor(Protocol):
    """Executor of steps, one at a time, from their messages alone."""

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute a step, including snapshots. If that raises, the step is void."""

    def idle(self) -> None:
        """Take part in a step without chunks; ranks that share experts take part in the computation of others."""


class Computing(Protocol):
    """Handle of a step that may still be computed."""

    def result(self) -> StepResult:
        """Wait for the result, once. If that raises, the step is void."""


@dataclass(frozen=True)
class Computed:
    """Handle of a step that has been computed."""

    found: StepResult

    def result(self) -> StepResult:
        """Return the result; see `Computing`."""
        return self.found


@runtime_checkable
class Launching(Protocol):
    """Executor that lets the host do other work while it computes."""

    def launch(self, step: ScheduledStep) -> Computing:
        """Launch a step. If that raises, the step is void; steps are computed in the order of launches."""


@runtime_checkable
class AsyncExecutor(Launching, Protocol):
    """Executor that can launch a step while the one before, whose tokens it uses on the device, is computed."""

    @property
    def can_launch_next(self) -> bool:
        """True if the tokens of the step launched last are available to another step on the device."""

    def launch_next(self, step: ScheduledStep) -> Computing | None:
        """Launch a step of requests in the step launched last: decodes of `LAST_SAMPLED`, chunks that go on a prompt.

        Returns:
            None if this step cannot be launched before the tokens of that one are known; then nothing was done.
        """

    def name_states(self, states: Sequence[Snapshot]) -> None:
        """Set the block hashes of snapshots of a launched step, which were not known then."""


def launcher(executor: Executor) -> Callable[[ScheduledStep], Computing]:
    """Return the function that launches steps; without `Launching`, a step is computed when its launch returns."""
    if isinstance(executor, Launching):
        return executor.launch
    return lambda step: Computed(executor.execute(step))
