"""Executors of several ranks: one shares its result, one receives the result of another replica."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from megatron_ext.engine.result import StepResult
from megatron_ext.parallel.shared_results import Results
from megatron_ext.scheduling.audit import Differences
from megatron_ext.scheduling.step import ScheduledStep


class Part(Protocol):
    """Part of a step that one rank computes."""

    def compute(self, step: ScheduledStep) -> StepResult | None:
        """Compute the part; return a result on the rank that samples."""

    def compare(self, step: ScheduledStep) -> dict[int, Differences]:
        """Compare what audits have just computed with cached entries, in the layers of this rank."""

    def idle(self) -> None:
        """Take part in other ranks' MoE layers; see `Executor.idle`."""


class SharedExecutor:
    """Executor that computes this rank's part of a step, and returns the whole replica's result.

    Args:
        part: This rank's part of the model.
        results: Results of the replica.
    """

    def __init__(self, part: Part, results: Results) -> None:
        self._part = part
        self._results = results

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute and share a step; see `Executor.execute`."""
        result = self._results.share(step, self._part.compute(step))
        if not step.comparisons:
            return result
        return dataclasses.replace(result, differences=self._results.merge(step, self._part.compare(step)))

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
        result = self._results.share(step, None)
        return dataclasses.replace(result, differences=self._results.merge(step, {})) if step.comparisons else result

    def idle(self) -> None:
        """Do nothing: an idle step of the other replica has no result."""
