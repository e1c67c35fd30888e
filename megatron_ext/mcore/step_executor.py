"""Step executor: stage a scheduled step, run the forward, sample, and complete its snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_ext.engine.executor import Computed, Computing
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.memory.fork_copies import copy_forks
from megatron_ext.ops.backends import preferring
from megatron_ext.scheduling.audit import Differences
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import ScheduledStep


class StepExecutor:
    """Executor of steps, one at a time, from their messages alone.

    Args:
        context: Pools and the staged step.
        controller: Controller around the model.
    """

    def __init__(self, context: InferenceContext, controller: InferenceController) -> None:
        self._context = context
        self._controller = controller

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run `compute` with the whole model on this rank."""
        return self._whole(step, self.compute(step))

    def _whole(self, step: ScheduledStep, result: StepResult | None) -> StepResult:
        assert result is not None, "the last stage is here"
        return dataclasses.replace(result, differences=self.compare(step)) if step.comparisons else result

    def compare(self, step: ScheduledStep) -> dict[int, Differences]:
        """Compare cached entries with those that audits have just computed, in the layers of this rank."""
        return self._context.compare(step.comparisons)

    def launch(self, step: ScheduledStep) -> Computing:
        """Launch a step, see `Launching.launch`; a step without a bucket is complete when this returns."""
        return self._launch_captured(step) or Computed(self._whole(step, self.compute_eagerly(step)))

    def _launch_captured(self, step: ScheduledStep) -> Computing | None:
        """Launch a step by captured graphs; None if it must be eager."""
        fixed = self._context.cuda_graph_runner
        bucket = None if fixed is None or step.comparisons or step.forks else fixed.find(step)
        if fixed is None or bucket is None:
            return None
        with preferring(self._controller.operators):
            return fixed.launch(step, bucket)

    @property
    def can_launch_next(self) -> bool:
        """True if the next step can be launched; see `AsyncExecutor.can_launch_next`."""
        fixed = self._context.cuda_graph_runner
        return fixed is not None and fixed.has_tokens

    def launch_next(self, step: ScheduledStep) -> Computing | None:
        """Launch the next step, see `AsyncExecutor.launch_next`; None for an eager step, which needs known tokens."""
        fixed = self._context.cuda_graph_runner
        bucket = None if fixed is None else fixed.find_next(step)
        if fixed is None or bucket is None:
            return None
        with preferring(self._controller.operators):
            return fixed.launch(step, bucket)

    def name_states(self, states: Sequence[Snapshot]) -> None:
        """Record the block hashes of snapshots; see `AsyncExecutor.name_states`."""
        if states:
            assert self._context.snapshots is not None, "only a model with states has any to name"
            self._context.snapshots.close([one.slot for one in states], [one.block_hash for one in states])

    def compute(self, step: ScheduledStep) -> StepResult | None:
        """Compute a step, by captured graphs if it fits one; all ranks of a model choose the same ones.

        Returns:
            None on stages before the last one.

        Raises:
            RestoreError: A snapshot is not the one that its request was to resume from.
        """
        launched = self._launch_captured(step)
        return self.compute_eagerly(step) if launched is None else launched.result()

    def compute_eagerly(self, step: ScheduledStep) -> StepResult | None:
        """Compute a step. If anything raises, the step has no effect, and its requests' pool contents are undefined.

        Returns:
            None on stages before the last one.

        Raises:
            RestoreError: A snapshot is not the one that its request was to resume from.
        """
        if self._context.cuda_graph_runner is not None:
            self._context.cuda_graph_runner.forget_tokens()
        with preferring(self._controller.operators):  # restores and snapshots are operators, too
            try:
                self._context.stage(step)
                result = self._controller.compute_step()
                self._context.finish_snapshots()
                copy_forks(self._context.allocated, step.forks)
            finally:
                self._context.clear_step()
        return result

    def idle(self) -> None:
        """Take part in the MoE layers of ranks that have work; no other rank depends on this one."""
        self._controller.idle_step()
