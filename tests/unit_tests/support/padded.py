"""Drivers of engines whose steps are padded and computed in fixed places, with NaN wherever padding is at home."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

from megatron_ext.mcore import cuda_graph_setup
from megatron_ext.ops.causal_conv1d import CAUSAL_CONV1D
from megatron_ext.ops.gated_delta_rule import GATED_DELTA_RULE
from megatron_ext.ops.paged_attention import PAGED_ATTENTION
from megatron_ext.ops.selective_scan import SELECTIVE_SCAN
from megatron_ext.ops.ssd import SSD
from megatron_ext.runner.cuda_graphs.async_output import Launched
from megatron_ext.runner.cuda_graphs.buckets import Bucket
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.runner.cuda_graphs.graph_capture import Capture
from megatron_ext.runner.cuda_graphs.input_batch import DUMMY_REQUEST
from megatron_ext.runner.model_input import ModelInput
from megatron_ext.runner.sampler import SamplerNeeds
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep
from tests.unit_tests.support.driver import Driver
from tests.unit_tests.support.hybrid_caching import HybridDriver

_OPERATORS = (CAUSAL_CONV1D, SSD, SELECTIVE_SCAN, GATED_DELTA_RULE)


@contextlib.contextmanager
def operators_by(backend: str) -> Iterator[None]:
    """Use this backend for each operator that has it; shapes of the reference show the sizes of a captured step."""
    with contextlib.ExitStack() as stack:
        for backends in (PAGED_ATTENTION, *(operator.backends for operator in _OPERATORS)):
            if backend in backends.names:
                stack.enter_context(backends.forced(backend))
        yield


class Padded:
    """Mixin for drivers: captured steps of few sizes, and requests that captured steps accept.

    Attributes:
        buckets: Buckets of the captured steps.
        eager_steps: Number of eager steps.
    """

    def __init__(self, *args: object, **batching: object) -> None:
        self.buckets: list[Bucket] = []
        self.eager_steps = 0
        self._left: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by request and its end
        uncaptured = Capture()  # so that each forward is seen on a device, too
        with mock.patch.object(cuda_graph_setup, "CudaGraphs", return_value=uncaptured):
            super().__init__(*args, **({"cuda_graph_impl": "local", "num_cuda_graphs": 3} | batching))
        self._watch_graphs(self.context.cuda_graph_runner)

    def _watch_graphs(self, fixed: CudaGraphRunner) -> None:
        find, sample, sample_eager = fixed.find, fixed.sample, fixed.sample_eager

        def find_noted(step: ScheduledStep) -> Bucket | None:
            bucket = find(step)
            self.eager_steps += bucket is None
            return bucket

        def sample_noted(bucket: Bucket, chunks: Sequence[ScheduledChunk], needs: SamplerNeeds) -> Launched:
            self.buckets.append(bucket)
            self._keep_states([chunk for chunk in chunks if chunk.request_id != DUMMY_REQUEST])
            return sample(bucket, chunks, needs)

        def sample_eager_noted(logits: Tensor, step: ModelInput) -> Launched:
            self._keep_states(step.chunks)
            return sample_eager(logits, step)

        fixed.find, fixed.sample, fixed.sample_eager = find_noted, sample_noted, sample_eager_noted

    def _keep_states(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Keep copies of the states a step leaves: by its commit the next step may have been computed."""
        pool = self.context.allocated.live_states
        for chunk in chunks if pool is not None else ():
            states = pool.conv[:, chunk.running_slot].clone(), pool.ssm[:, chunk.running_slot].clone()
            self._left[chunk.request_id, chunk.end] = states

    def _note_states(self, request: Request, start: int, end: int) -> None:
        left = self._left.pop((request.request_id, end), None)
        super()._note_states(request, start, end)
        if left is not None:
            self.seen[request.request_id].states[end][-1] = left

    def _held_slots(self) -> set[int]:
        """Slots written by the step that was launched ahead, which a CPU has already computed."""
        in_flight = self.engine.core.replicas[0].async_scheduling._in_flight
        return set() if in_flight is None else {one.slot for chunk in in_flight.step.chunks for one in chunk.snapshots}

    @property
    def steps_ahead(self) -> int:
        """Steps that were launched before the tokens of the one before were known."""
        return self.scheduler.counters.launched_ahead

    def wait_for_tokens(self) -> None:
        """Launch every following step only after the previous one has ended."""
        self.engine.core.replicas[0].async_scheduling._executor = None

    def add(self, request_id: int, prompt: str | Sequence[int], **params: object):
        """Add a request, without prompt log-probs unless asked for: those need eager steps."""
        return super().add(request_id, prompt, **({"return_log_probs": False} | params))

    def step(self) -> dict:
        """Poison the padding rows' blocks and slots, then step."""
        self.poison_padding()
        return super().step()

    def poison_padding(self) -> None:
        context, limits, geometry = self.context, self.context.plan.limits, self.context.plan.geometry
        if context.pools is None:
            return
        if context.plan.shape.attention_layers:
            context.memory_buffer[:, :, geometry.blocks] = torch.nan
        live, snapshots = context.pools.live_states, context.pools.snapshots
        for pool, slot in ((live, limits.max_requests), (snapshots, context.plan.padding_slot)):
            if pool is not None:
                pool.conv[:, slot], pool.ssm[:, slot] = torch.nan, torch.nan

    def _watch_slots(self) -> None:
        """Slots that were given up are poisoned before a step, not when they are opened: restores come after that."""
        self._watch_slabs()
        self._poison_slots(self.scheduler.queues)

    def _run_forward(self, forward):
        return forward()

    def _watch_forward(self) -> None:
        controller = self.engine.controller
        forward = controller.forward

        def forward_watched() -> Tensor:
            logits = forward()
            for row, chunk in rows_of(self.context.step):
                self.seen[chunk.request_id].logits[chunk.end].append(logits[0, row].clone().cpu())
            return logits

        controller.forward = forward_watched


def rows_of(step: ModelInput) -> Iterator[tuple[int, ScheduledChunk]]:
    """Yield each logits row and its chunk: padded steps have a row for each chunk, others for those that sample."""
    sampled = [(row, chunk) for row, chunk in enumerate(step.chunks) if chunk.sampling is not None]
    if step.paged_batch.has_static_shapes:
        assert len(step.chunks) == len(step.sample_tokens)
        return iter((row, chunk) for row, chunk in sampled if chunk.request_id != DUMMY_REQUEST)
    return iter((i, chunk) for i, (_, chunk) in enumerate(sampled))


class PaddedDriver(Padded, Driver):
    """`Driver`, padded."""


class PaddedHybridDriver(Padded, HybridDriver):
    """`HybridDriver`, padded; writes of keys are not watched, since padding has some of its own."""
