"""Who computes the steps that an engine plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron_ext.engine.result import StepResult
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import ScheduledStep


class Executor(Protocol):
    """Computes steps, one at a time, from their messages alone."""

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute a step, snapshots included. If anything raises, nothing of it counts."""

    def idle(self) -> None:
        """A step without anything to compute; ranks that share experts take part in what others compute."""


class Computing(Protocol):
    """A step that may still be computed."""

    def result(self) -> StepResult:
        """Wait for it, once. If that raises, nothing of the step counts."""


@dataclass(frozen=True)
class Computed:
    """A step that has been."""

    found: StepResult

    def result(self) -> StepResult:
        """See `Computing`."""
        return self.found


@runtime_checkable
class Launching(Protocol):
    """An executor that lets the host do something else while it computes."""

    def launch(self, step: ScheduledStep) -> Computing:
        """Begin a step. If anything raises, nothing of it counts; steps are computed in the order of their launches."""


@runtime_checkable
class AsyncExecutor(Launching, Protocol):
    """One that can begin a step while the one before is computed, whose tokens it then takes from where they are."""

    @property
    def can_launch_next(self) -> bool:
        """Whether the step that was launched last leaves its tokens where another one finds them."""

    def launch_next(self, step: ScheduledStep) -> Computing | None:
        """Begin a step of decodes of `LAST_SAMPLED`, each a request's of the step that was launched last.

        Returns:
            None if this step cannot be begun before that one's tokens are known; then nothing has been done.
        """

    def name_states(self, states: Sequence[Snapshot]) -> None:
        """Snapshots of a step that has been launched, whose block hashes were not known then."""


def launcher(executor: Executor) -> Callable[[ScheduledStep], Computing]:
    """How steps are begun; with an executor that knows no launch a step has been computed when it has been begun."""
    if isinstance(executor, Launching):
        return executor.launch
    return lambda step: Computed(executor.execute(step))
