"""Executors of several ranks: a result that is shared, and one that is waited for."""

from __future__ import annotations

from typing import Protocol

from megatron_ext.engine.result import StepResult
from megatron_ext.parallel.shared_results import Results
from megatron_ext.scheduling.step import ScheduledStep


class Part(Protocol):
    """A rank's part of a step."""

    def compute(self, step: ScheduledStep) -> StepResult | None:
        """Compute it; a result where tokens are sampled."""

    def idle(self) -> None:
        """See `Executor.idle`."""


class SharedExecutor:
    """Computes this rank's part of a step, and has the whole replica's result.

    Args:
        part: Of the model.
        results: Of the replica.
    """

    def __init__(self, part: Part, results: Results) -> None:
        self._part = part
        self._results = results

    def execute(self, step: ScheduledStep) -> StepResult:
        """See `Executor.execute`."""
        return self._results.share(step, self._part.compute(step))

    def idle(self) -> None:
        """See `Executor.idle`."""
        self._part.idle()


class RemoteExecutor:
    """Computes nothing: on rank 0 it waits for what another replica has computed.

    Args:
        results: Of that replica.
    """

    def __init__(self, results: Results) -> None:
        self._results = results

    def execute(self, step: ScheduledStep) -> StepResult:
        """See `Executor.execute`."""
        return self._results.share(step, None)

    def idle(self) -> None:
        """Whatever that replica does then, there is no result of it."""
