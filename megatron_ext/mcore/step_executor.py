"""Step executor: stage a scheduled step, run the forward, sample, and complete its snapshots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from megatron_ext.engine.executor import Computed, Computing
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.memory.fork_copies import copy_forks
from megatron_ext.ops.backends import preferring
from megatron_ext.runner.cuda_graphs.buckets import why_eager
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
        """Launch a step, see `Launching.launch`; some eager steps are complete when this returns."""
        launched = self._launch_captured(step) or self._launch_eagerly(step)
        return launched or Computed(self._whole(step, self.compute_eagerly(step)))

    def _launch_captured(self, step: ScheduledStep) -> Computing | None:
        """Launch a step by captured graphs; None if it must be eager."""
        runner = self._context.cuda_graph_runner
        bucket = None if runner is None or step.comparisons or step.forks else runner.find(step)
        if runner is None or bucket is None:
            return None
        with preferring(self._controller.operators):
            return runner.launch(step, bucket)

    def _launch_eagerly(self, step: ScheduledStep) -> Computing | None:
        """Launch an eager step whose results stay on the device; None if they must be read back at once.

        If anything raises, the step has no effect, as in `compute_eagerly`.
        """
        runner = self._context.cuda_graph_runner
        if runner is None or step.comparisons or step.forks or why_eager(step) is not None:
            return None
        with preferring(self._controller.operators):
            try:
                self._context.stage(step)
                runner.prev_sampled_token_ids.forget()
                with torch.inference_mode():
                    logits = self._controller.forward()
                assert logits is not None, "the last stage is here"
                launched = runner.eager_output.launch(logits[0], self._context.staged)
                self._context.finish_snapshots()
            except BaseException:
                runner.prev_sampled_token_ids.forget()
                raise
            finally:
                self._context.clear_step()
        return launched

    @property
    def can_launch_next(self) -> bool:
        """True if the next step can be launched; see `AsyncExecutor.can_launch_next`."""
        runner = self._context.cuda_graph_runner
        return runner is not None and runner.prev_sampled_token_ids.are_on_device

    def launch_next(self, step: ScheduledStep) -> Computing | None:
        """Launch the next step, see `AsyncExecutor.launch_next`.

        An eager step whose forward waits for the device is not launched: it would delay the tokens before it.
        """
        runner = self._context.cuda_graph_runner
        if runner is None:
            return None
        bucket = runner.find_next(step)
        if bucket is None:
            return None if self._controller.waits_in_forward else self._launch_eagerly(step)
        if not runner.is_captured(bucket):
            return None
        with preferring(self._controller.operators):
            return runner.launch(step, bucket)

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
            self._context.cuda_graph_runner.prev_sampled_token_ids.forget()
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
