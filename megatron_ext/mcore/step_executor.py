"""Step executor: compute a scheduled step by the forward that suits it, eager, recorded or captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from megatron_ext.engine.executor import Computed, Computing, Executor
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.memory.entry_memory import compare_entries
from megatron_ext.memory.step_states import StepStates
from megatron_ext.runner.cuda_graphs.async_output import Launched
from megatron_ext.runner.cuda_graphs.buckets import why_eager
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import ScheduledStep

Sampled = TypeVar("Sampled")


class StepExecutor(Executor):
    """Executor of steps, one at a time, from their messages alone.

    The forward of a step is a graph, if the step fits one (`CudaGraphRunner`); else it is eager: the model's Python
    code, or a record of its operators (`RecordedSteps`). The tokens of captured steps, and of eager ones between them,
    stay on the device for the next step (`Launched`); other steps are complete when their launch returns.

    Args:
        context: Pools and the staged step.
        controller: Controller around the model.
    """

    def __init__(self, context: InferenceContext, controller: InferenceController) -> None:
        self._context = context
        self._controller = controller

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute this rank's part of a step; all ranks of a model choose the same forward.

        Returns:
            Result with the differences that an audit has found in this rank's layers; no tokens on stages before the
            last one.

        Raises:
            RestoreError: A slot does not hold the snapshot that a request needs.
        """
        return self.launch(step).result()

    def launch(self, step: ScheduledStep) -> Computing:
        """Launch a step, see `Executor.launch`; some eager steps are complete when this returns."""
        return self._launch(step) or Computed(self.compute_eagerly(step))

    @property
    def can_launch_next(self) -> bool:
        """True if the next step can be launched; see `Executor.can_launch_next`."""
        runner = self._context.cuda_graph_runner
        return runner is not None and runner.prev_sampled_token_ids.are_on_device

    def launch_next(self, step: ScheduledStep) -> Computing | None:
        """Launch the next step, see `Executor.launch_next`."""
        return self._launch(step, is_next=True)

    def _launch(self, step: ScheduledStep, *, is_next: bool = False) -> Launched | None:
        """Launch a step whose tokens stay on the device; None if it must be computed and read at once.

        Args:
            step: Scheduled step.
            is_next: Whether the tokens of the step before have not been read. They must not wait for this step's
                forward, nor be overwritten by a capture, which computes padding.
        """
        runner = self._context.cuda_graph_runner
        if runner is None or step.comparison is not None or step.forks:
            return None
        forward: Callable[[ScheduledStep, StepStates], Callable[[], Launched]]
        bucket = runner.find(step)
        if bucket is not None:
            if is_next and not runner.is_captured(bucket):
                return None
            forward = partial(runner.forward, bucket)
        elif why_eager(step) is None and not (is_next and self._controller.waits_in_forward):
            forward = partial(self._forward, partial(self._leave_tokens, runner))
        else:
            return None
        try:
            launched = self._context.compute(step, forward, self._controller.operators)
        except BaseException:
            runner.prev_sampled_token_ids.forget()
            raise
        runner.prev_sampled_token_ids.note(launched.rows)
        return launched

    def name_states(self, states: Sequence[Snapshot]) -> None:
        """Record the block hashes of snapshots; see `Executor.name_states`."""
        if states:
            snapshots = self._context.allocated.snapshots
            assert snapshots is not None, "only a model with states has any to name"
            snapshots.close([one.slot for one in states], [one.block_hash for one in states])

    def compute_eagerly(self, step: ScheduledStep) -> StepResult:
        """Compute a step by an eager forward and read its results; see `execute`."""
        if self._context.cuda_graph_runner is not None:
            self._context.cuda_graph_runner.prev_sampled_token_ids.forget()
        forward = partial(self._forward, partial(self._read_tokens, step))
        return self._context.compute(step, forward, self._controller.operators)

    def _forward(
        self, sample: Callable[[Tensor | None], Sampled], step: ScheduledStep, states: StepStates
    ) -> Callable[[], Sampled]:
        """Run an eager or recorded forward, whose logits [1, m, V] `sample` gets; None before the last stage."""
        states.restore()
        self._context.stage(step)
        return partial(sample, self._controller.forward())

    def _leave_tokens(self, runner: CudaGraphRunner, logits: Tensor | None) -> Launched:
        """Sample where captured steps leave their tokens."""
        assert logits is not None, "the last stage is here"
        return runner.sample_eager(logits[0], self._context.staged)

    def _read_tokens(self, step: ScheduledStep, logits: Tensor | None) -> StepResult:
        """Sample and score on the last stage, and compare what an audit has computed."""
        result = StepResult() if logits is None else self._controller.sample(logits[0])
        if step.comparison is None:
            return result
        differences = compare_entries(self._context.allocated, step.comparison, self._context.params_dtype)
        return dataclasses.replace(result, differences=differences)

    def idle(self) -> None:
        """Take part in the MoE layers of ranks that have work; no other rank depends on this one."""
        self._controller.idle_step()
