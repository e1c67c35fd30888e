"""CUDA graph runner: pad a step to a bucket, copy it in once, replay captured graphs, copy results back once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_ext.errors import ConfigError
from megatron_ext.memory.engine_plan import EnginePlan
from megatron_ext.memory.host_limits import allocating
from megatron_ext.memory.pools import Pools
from megatron_ext.memory.state_pool import SnapshotPool, StatePool, copy_rows
from megatron_ext.memory.step_states import RowPairs, StepStates
from megatron_ext.ops.backends import preferring
from megatron_ext.runner.cuda_graphs.async_output import Launched, output_layout
from megatron_ext.runner.cuda_graphs.buckets import Bucket, Buckets, why_eager
from megatron_ext.runner.cuda_graphs.graph_capture import Capture, Graph, HoldingCapture
from megatron_ext.runner.cuda_graphs.graph_sampler import GraphSampler, score
from megatron_ext.runner.cuda_graphs.input_batch import InputBatch, SpareSlots, layout_of, model_input
from megatron_ext.runner.cuda_graphs.input_buffers import (
    AsyncModelOutput,
    BlockTables,
    InputBuffers,
    PrevSampledTokenIds,
)
from megatron_ext.runner.input_writer import StagingRules
from megatron_ext.runner.layout import Layout
from megatron_ext.runner.logits_processors import (
    entry_counts,
    logits_layout,
    room_for,
    unsent_entries,
    write_logits_inputs,
)
from megatron_ext.runner.model_input import ModelInput
from megatron_ext.runner.sampler import SamplerNeeds, eager_processed_logits, sampler_needs_of
from megatron_ext.runner.step_output import next_tokens
from megatron_ext.scheduling.step import Sampling, ScheduledChunk, ScheduledStep

logger = logging.getLogger(__name__)

_EMPTY = ScheduledStep((), 0)
_EVERYTHING = SamplerNeeds(is_processed=True, has_mask=True, is_drawn=True, is_scored=True)
_LESS = (
    "give a smaller --inference-dynamic-batching-buffer-size-gb or --inference-dynamic-batching-max-requests, "
    "or --cuda-graph-impl none"
)


class CapturedModel(Protocol):
    """Model and pools of this rank, as graphs use them.

    Attributes:
        vocabulary_size: V, the width of the logits.
        has_processed_log_probs: Whether log-probs are of the distributions that tokens are drawn from.
        operators: Backend name of the operators, or AUTO; see `ops.backend_selection`.
    """

    vocabulary_size: int
    has_processed_log_probs: bool
    operators: str

    @property
    def pools(self) -> Pools | None:
        """Pools; None while they are freed."""

    def weight_addresses(self) -> tuple[int, ...]:
        """Return the memory addresses of parameters and buffers."""

    def forward_captured(self, step: ModelInput) -> Tensor:
        """Return the logits of a step [rows, V], computed in shapes that do not depend on values."""

    def writing(self, chunks: Sequence[ScheduledChunk]) -> AbstractContextManager[None]:
        """Return the context of a step with these chunks, one per row; see `HiddenStates.writing`."""


@dataclass(frozen=True)
class BucketGraphs:
    """Captured graphs of a bucket: restores, forward and snapshots, then sampling and log-probs."""

    forward: Graph
    choice: GraphSampler


class CudaGraphRunner:
    """Runner of the steps that fit a bucket, by captured graphs.

    Args:
        model: Model whose pools have spare slots.
        plan: Sizes of the pools.
        rules: Constants of pools and model.
        buckets: Sizes that steps are padded to.
        graphs: Captures the graphs.
        has_peers: Whether other ranks capture the same graphs, with messages between them inside. Then all ranks drop
            their graphs at the same commands, and capture later ones in the steps that need them.

    Attributes:
        prev_sampled_token_ids: Tokens that the step launched last has left on the device.
    """

    def __init__(
        self,
        model: CapturedModel,
        plan: EnginePlan,
        rules: StagingRules,
        buckets: Buckets,
        graphs: Capture,
        *,
        has_peers: bool = False,
    ) -> None:
        self._model, self._rules, self.has_peers = model, rules, has_peers
        self._buckets, self._graphs = buckets, HoldingCapture(graphs, model.weight_addresses)
        self._spare = SpareSlots.of(plan, rules.device)
        self._tables = BlockTables(self._spare.live + 1, buckets.widths[-1], rules.dummy_block, rules.device)
        self._writer = InputBatch(self._rules, self._spare, self._tables.rows)
        self._layouts: dict[Bucket, Layout] = {one: layout_of(one, self._rules) for one in buckets.all()}
        self._vocabulary = size = model.vocabulary_size
        self._processed, self._guided = (
            {
                one: layout | logits_layout(one.rows, room_for(one.rows), size, has_mask=has_mask)
                for one, layout in self._layouts.items()
            }
            for has_mask in (False, True)
        )
        answer = output_layout(max(one.rows for one in self._layouts), self._vocabulary)
        self._buffers = InputBuffers(self._guided.values(), self._rules.device, answer.count)
        self._outputs = AsyncModelOutput(self._buffers.answer, self._rules.device)
        self.prev_sampled_token_ids = PrevSampledTokenIds(self._buffers)
        self._logits: Tensor | None = None  # [max rows, V], the output buffer of every forward
        self._captured: dict[Bucket, BucketGraphs] = {}
        self._pools: Pools | None = None  # pools that the graphs were captured for; likewise the next
        self._weights: tuple[int, ...] = ()
        self._chunks: tuple[ScheduledChunk, ...] = ()  # chunks of the step in the buffers
        self._logged_reasons: set[str] = set()

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a captured step, padding included."""
        return max(one.num_tokens for one in self._layouts)

    # Graphs

    def prepare(self) -> None:
        """Capture the graphs of every bucket, if capture is slow and these pools have none.

        Raises:
            ConfigError: The pools leave too little memory for the graphs; none is kept then.
        """
        if not self._graphs.takes_long or (self._captured and self._model.pools is self._pools):
            return
        self.forget()
        buckets = self._buckets.all()
        try:
            with allocating(f"captured steps of {len(buckets)} sizes", lambda: _LESS):
                for bucket in tqdm(buckets, desc="captured steps", unit="size", leave=False, disable=None):
                    self._graphs_of(bucket)
        except ConfigError:
            self.forget()
            raise

    def forget(self) -> None:
        """Drop all graphs after pools or weights have moved or been freed; they hold no memory until captured again."""
        self._captured.clear()
        self.prev_sampled_token_ids.forget()
        self._graphs.forget()
        self._logits = None
        self._pools, self._weights = self._model.pools, self._model.weight_addresses()

    def notice_new_weights(self) -> None:
        """Drop the graphs if changed weights have moved, as they would read freed memory; else keep them.

        With other ranks they are dropped in any case: weights may have moved on one of them only.
        """
        if self._captured and (self.has_peers or self._weights != self._model.weight_addresses()):
            self.forget()

    def _graphs_of(self, bucket: Bucket) -> BucketGraphs:
        if self._model.pools is not self._pools:
            self.forget()
        if bucket not in self._captured:
            self._send(_EMPTY, bucket, _EVERYTHING)  # capture computes only padding rows
            with preferring(self._model.operators):  # also at the start, before any launch
                self._captured[bucket] = self._make(bucket)
            self._weights = self._model.weight_addresses()  # experts' weights may be contiguous now
        return self._captured[bucket]

    @torch.inference_mode()
    def _make(self, bucket: Bucket) -> BucketGraphs:
        if self._logits is None:
            logits = self._forward_logits(bucket)
            self._logits = logits.new_zeros(max(one.rows for one in self._layouts), logits.shape[1])
        logits, layout = self._logits[: bucket.rows], output_layout(bucket.rows, self._vocabulary)
        forward = self._graphs.capture(partial(self._forward, bucket, logits))
        parts = self._buffers.parts(self._guided[bucket])
        answer, is_processed = layout.parts(self._buffers.answer), self._model.has_processed_log_probs
        sampler = GraphSampler(self._graphs, logits, parts, answer, has_processed_log_probs=is_processed)
        return BucketGraphs(forward, sampler)

    # Steps

    def find(self, step: ScheduledStep) -> Bucket | None:
        """Return the bucket of a step; None if the step must run eagerly. Each reason but the size is logged once."""
        bucket, reason = self._find(step)
        if reason is not None and reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            logger.warning("steps that ask for this are computed eagerly, not as captured steps: %s", reason)
        return bucket

    def _find(self, step: ScheduledStep) -> tuple[Bucket | None, str | None]:
        """Return the bucket of a step, or the reason why it has none; neither if it is larger than every bucket."""
        reason = why_eager(step)
        bucket = self._buckets.find(step) if reason is None else None
        if bucket is not None:
            needed, room = entry_counts(_sampling(step.chunks), self._vocabulary), room_for(bucket.rows)
            if any(needed[name] > room[name] for name in room):
                return None, "more penalized tokens, biases or words than there is room for"
        return bucket, reason

    def is_captured(self, bucket: Bucket) -> bool:
        """Return whether the graphs of a bucket exist; capturing computes padding, which overwrites the last tokens."""
        return bucket in self._captured and self._model.pools is self._pools

    def forward(self, bucket: Bucket, step: ScheduledStep, states: StepStates) -> Callable[[], Launched]:
        """Send a step and replay the graph of its bucket, with copies of states inside; return what samples it."""
        graphs = self._graphs_of(bucket)  # before the step is written: the graph may have to be captured
        needs = sampler_needs_of(_sampling(step.chunks))
        chunks = self._send(step, bucket, needs, *states.take(bucket.copies))
        with self._model.writing(chunks):
            graphs.forward()
        return partial(self.sample, bucket, chunks, needs)

    def sample(self, bucket: Bucket, chunks: Sequence[ScheduledChunk], needs: SamplerNeeds) -> Launched:
        """Sample and, if a row requests it, score a replayed step; enqueue the copy of the results to the host."""
        self._captured[bucket].choice.run(needs)
        layout = output_layout(bucket.rows, self._vocabulary)
        rows = [(chunk.request_id, chunk.sampling) for chunk in chunks]
        return Launched(self._outputs, layout, rows, is_scored=needs.is_scored, graph_rows=len(chunks))

    def sample_eager(self, logits: Tensor, step: ModelInput) -> Launched:
        """Sample an eager step as `sample` does, and leave its tokens where captured steps leave theirs.

        Args:
            logits: Logits [m, V] of the step's sampling rows; at most as many as the largest captured step has.
            step: Step without drafts and scored prompts.
        """
        layout = output_layout(len(logits), self._vocabulary)
        parts = layout.parts(self._buffers.answer)
        parts["tokens"].copy_(next_tokens(logits, step))
        is_scored = any(row.sampling.top_n is not None for row in step.sampling)
        if is_scored:
            if self._model.has_processed_log_probs:
                logits = eager_processed_logits(logits, parts["tokens"], [row.sampling for row in step.sampling])
            score(logits, parts)
        rows = [(one.request_id, one.sampling) for one in step.sampling]
        return Launched(self._outputs, layout, rows, is_scored=is_scored)

    def _send(
        self,
        step: ScheduledStep,
        bucket: Bucket,
        needs: SamplerNeeds,
        restores: RowPairs = (),
        copies: RowPairs = (),
    ) -> tuple[ScheduledChunk, ...]:
        """Write the step into the input buffers and send them; see `InputBatch.write`.

        Returns:
            One chunk per row.
        """
        layouts = self._guided if needs.has_mask else self._processed if needs.is_processed else self._layouts
        layout = layouts[bucket]
        chunks, arrays = self._writer.pad(step, bucket), self._buffers.open(layout)
        self._writer.write(chunks, bucket, arrays, restores, copies)
        arrays["token_places"][:] = self.prev_sampled_token_ids.places_of(chunks[: bucket.decodes], layout)
        unused = 0
        if needs.is_processed:
            used = write_logits_inputs(_sampling(chunks), self._vocabulary, arrays)
            unused = 0 if needs.has_mask else unsent_entries(room_for(bucket.rows), used)
        self._tables.send_rows()
        self._buffers.send(layout, unused=unused)
        self._chunks = chunks
        return chunks

    # Captured work

    @torch.inference_mode()
    def _forward(self, bucket: Bucket, logits: Tensor) -> None:
        """Restore, compute and snapshot the step in the input buffers; write logits [rows, V] to the output buffer."""
        logits.copy_(self._forward_logits(bucket))

    @torch.inference_mode()
    def _forward_logits(self, bucket: Bucket) -> Tensor:
        parts = self._buffers.parts(self._layouts[bucket])
        live, snapshots = self._states
        if bucket.prefills and live is not None and snapshots is not None:
            copy_rows(snapshots, parts["restore_from"], live, parts["restore_to"])
        parts["input_ids"] = self.prev_sampled_token_ids.fill_in(bucket, parts)
        parts["block_table"] = self._tables.gather(parts["table_rows"], bucket.blocks)
        logits = self._model.forward_captured(model_input(self._chunks, bucket, parts, self._rules))
        if live is not None and snapshots is not None:
            copy_rows(live, parts["copy_from"], snapshots, parts["copy_to"])
        return logits

    @property
    def _states(self) -> tuple[StatePool | None, SnapshotPool | None]:
        """Running states and snapshots; None for models without recurrent layers."""
        pools = self._model.pools
        assert pools is not None, "the engine is suspended: there are no pools"
        return pools.live_states, pools.snapshots


def _sampling(chunks: Sequence[ScheduledChunk]) -> list[Sampling | None]:
    return [chunk.sampling for chunk in chunks]
