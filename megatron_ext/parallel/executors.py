"""Executors of several ranks: one shares its result, one receives the result of another replica."""

from __future__ import annotations

from megatron_ext.engine.executor import Executor
from megatron_ext.engine.result import StepResult
from megatron_ext.parallel.shared_results import Results
from megatron_ext.scheduling.step import ScheduledStep


class SharedExecutor:
    """Executor that computes this rank's part of a step, and returns the whole replica's result.

    Args:
        part: Executor of this rank's part of the model, whose result has tokens on the rank that samples only.
        results: Results of the replica.
    """

    def __init__(self, part: Executor, results: Results) -> None:
        self._part = part
        self._results = results

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute and share a step; see `Executor.execute`."""
        return self._results.share(step, self._part.execute(step))

    def idle(self) -> None:
        """Idle for one step; see `Executor.idle`."""
        self._part.idle()


class RemoteExecutor:
    """Executor that computes nothing: on rank 0, it receives the results of another replica.

    Args:
        results: Results of that replica.
    """

    def __init__(self, results: Results) -> None:
        self._results = results

    def execute(self, step: ScheduledStep) -> StepResult:
        """Receive the result of a step; see `Executor.execute`."""
        return self._results.share(step, StepResult())

    def idle(self) -> None:
        """Do nothing: an idle step of the other replica has no result."""
