"""Steps in fixed places: padded, sent in one copy, computed by a program of their bucket, answered in one copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_ext.engine.result import StepResult
from megatron_ext.mcore.buckets import Bucket, Buckets, why_eager
from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.fixed_places import Answer, Answers, FixedPlaces, Layout
from megatron_ext.mcore.fixed_step import SpareSlots, StepWriter, layout_of, model_input, wishes_of
from megatron_ext.mcore.graphs import Capture, Program
from megatron_ext.mcore.last_tokens import LastTokens
from megatron_ext.memory.pools import Pools
from megatron_ext.memory.state_pool import copy_rows, copy_states
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.sampling.in_place import best_tokens_of, draw_tokens
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep

logger = logging.getLogger(__name__)

_EMPTY = ScheduledStep((), 0)


@dataclass(frozen=True)
class Programs:
    """What computes the steps of a bucket: restores, forward and snapshots, then a token a row."""

    forward: Program
    choose_best: Program
    draw: Program


class Launched:
    """A step that the device may still be computing."""

    def __init__(self, answer: Answer, rows: Sequence[tuple[int, int]]) -> None:
        self._answer, self._rows = answer, rows

    def result(self) -> StepResult:
        """Wait for its tokens."""
        tokens = self._answer.read()
        return StepResult({name: tokens[row] for name, row in self._rows}, {}, {}, {})


class FixedSteps:
    """Computes steps that fit a bucket.

    Args:
        context: Its pools have spare slots.
        controller: Around the model.
        buckets: What steps are padded to.
        graphs: What makes programs.
    """

    def __init__(
        self, context: InferenceContext, controller: InferenceController, buckets: Buckets, graphs: Capture
    ) -> None:
        self._context, self._controller = context, controller
        self._buckets, self._graphs = buckets, graphs
        self._rules = context.staging_rules
        plan = context.plan
        self._spare = SpareSlots(plan.limits.max_requests, plan.geometry.snapshot_slots + plan.geometry.draft_states)
        self._writer = StepWriter(self._rules, buckets, self._spare)
        self._layouts: dict[Bucket, Layout] = {one: layout_of(one, self._rules) for one in buckets.all()}
        most = max(one.rows for one in self._layouts)
        self._places = FixedPlaces(self._layouts.values(), self._rules.device, most)
        self._answers = Answers(most, self._rules.device)
        self._last_tokens = LastTokens(self._places)
        self._programs: dict[Bucket, Programs] = {}
        self._pools: Pools | None = None  # that the programs were made for, as the next
        self._weights: tuple[int, ...] = ()
        self._chunks: tuple[ScheduledChunk, ...] = ()  # of the step that is written
        self._said: set[str] = set()

    # What there is

    def prepare(self) -> None:
        """Make the program of every bucket, where that takes long and pools have come since it was done."""
        if not self._graphs.takes_long or self._context.pools is self._pools:
            return
        self.forget()
        buckets = self._buckets.all()
        for bucket in tqdm(buckets, desc="programs of steps", unit="size", leave=False, disable=None):
            self._program(bucket)

    def forget(self) -> None:
        """Pools or weights lie elsewhere now, or nowhere: programs are made anew, and keep no memory until then."""
        self._programs.clear()
        self._last_tokens.forget()
        self._pools, self._weights = self._context.pools, self._controller.weight_addresses()

    def notice_new_weights(self) -> None:
        """Weights have changed; where they were not written in place, programs read what is no longer theirs."""
        if self._programs and self._weights != self._controller.weight_addresses():
            self.forget()

    def _program(self, bucket: Bucket) -> Programs:
        if self._context.pools is not self._pools:
            self.forget()
        if bucket not in self._programs:
            self._send(_EMPTY, bucket, [])  # whatever is computed while it is captured is nobody's
            with preferring(self._controller.operators):  # also at the start, before any launch
                self._programs[bucket] = self._make(bucket)
        return self._programs[bucket]

    @torch.inference_mode()
    def _make(self, bucket: Bucket) -> Programs:
        parts, capture, keep = self._places.parts(self._layouts[bucket]), self._graphs.capture, self._last_tokens.keep
        forward = capture(partial(self._forward, bucket))
        logits = _Held(forward)
        best = capture(lambda: keep(best_tokens_of(logits.value)))
        draw = capture(lambda: keep(draw_tokens(logits.value, wishes_of(parts))))
        return Programs(logits.run, best, draw)

    # Steps

    def find(self, step: ScheduledStep) -> Bucket | None:
        """The bucket that computes a step; None if it is to be computed as it is. Why is said once, but for sizes."""
        reason = why_eager(step)
        if reason is None:
            return self._buckets.find(step)
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("steps that ask for this are computed eagerly, not by a program: %s", reason)
        return None

    @property
    def has_tokens(self) -> bool:
        """Whether the step that was launched last was one of these, so that its tokens are where a program has them."""
        return self._last_tokens.are_there

    def forget_tokens(self) -> None:
        """A step is computed eagerly: what lies there is of no use behind it."""
        self._last_tokens.forget()

    def find_behind(self, step: ScheduledStep) -> Bucket | None:
        """The bucket of a step that may take tokens from the one before; None if no program is there for it.

        To make one computes padding, which would write over these tokens.
        """
        bucket = self._buckets.find(step) if why_eager(step) is None else None
        is_made = bucket in self._programs and self._context.pools is self._pools
        return bucket if is_made else None

    def launch(self, step: ScheduledStep, bucket: Bucket) -> Launched:
        """Enqueue a step. If anything raises, nothing of it counts.

        Raises:
            RestoreError: A snapshot is not the one that its request was to resume from.
        """
        self._program(bucket)  # before the step is written: it may have to be made
        copies, digests = self._open(step)
        try:
            chunks = self._send(step, bucket, copies[: bucket.copies])
            tokens = self._compute(bucket, chunks)
            self._close(copies[bucket.copies :], digests)
            answer = self._answers.fetch(tokens)
        finally:
            self._last_tokens.forget()
            self._context.clear_step()
        rows = [(chunk.request_id, row) for row, chunk in enumerate(chunks) if chunk.sampling is not None]
        self._last_tokens.note(rows)
        return Launched(answer, rows)

    @torch.inference_mode()
    def _compute(self, bucket: Bucket, chunks: Sequence[ScheduledChunk]) -> Tensor:
        programs = self._programs[bucket]
        programs.forward()
        is_drawn = any(one.sampling is not None and one.sampling.uniform is not None for one in chunks)
        return programs.draw() if is_drawn else programs.choose_best()

    def _send(
        self, step: ScheduledStep, bucket: Bucket, copies: Sequence[tuple[int, int]]
    ) -> tuple[ScheduledChunk, ...]:
        layout = self._layouts[bucket]
        chunks = self._writer.pad(step, bucket)
        arrays = self._places.open(layout)
        self._writer.write(chunks, bucket, arrays, copies)
        arrays["token_places"][:] = self._last_tokens.places_of(chunks[: bucket.decodes], layout)
        self._places.send(layout)
        self._chunks = chunks
        return chunks

    def _open(self, step: ScheduledStep) -> tuple[list[tuple[int, int]], list[tuple[int, bytes]]]:
        """What the host notes of snapshots: those restored are there, those to be written are not.

        Returns:
            Live states that become snapshots, as (live slot, slot), and (slot, digest) of all that are written.
        """
        snapshots = self._context.snapshots
        if snapshots is None:
            return [], []
        restored = [chunk.restore for chunk in step.chunks if chunk.restore is not None]
        snapshots.check([one.slot for one in restored], [one.digest for one in restored])
        taken = [(chunk, one) for chunk in step.chunks for one in chunk.snapshots]
        snapshots.open([one.slot for _, one in taken])
        at_ends = not self._rules.snapshots_in_prefill
        copies: list[tuple[int, int]] = [
            (chunk.live_slot, one.slot) for chunk, one in taken if chunk.is_decode or at_ends
        ]
        written: list[tuple[int, bytes]] = [(one.slot, one.digest) for _, one in taken]
        return copies, written

    def _close(self, copies: Sequence[tuple[int, int]], digests: Sequence[tuple[int, bytes]]) -> None:
        """The states that the program had no room for; then all are there for whatever is enqueued from now on."""
        live, snapshots = self._context.live_states, self._context.snapshots
        if live is None or snapshots is None:
            return
        if copies:
            sources, targets = zip(*copies, strict=True)
            copy_states(live, sources, snapshots, targets)
        snapshots.close([slot for slot, _ in digests], [digest for _, digest in digests])

    # What is captured

    @torch.inference_mode()
    def _forward(self, bucket: Bucket) -> Tensor:
        """Restores, forward and snapshots of what lies in the places: logits [rows, V]."""
        parts = self._places.parts(self._layouts[bucket])
        live, snapshots = self._context.live_states, self._context.snapshots
        if bucket.prefills and live is not None and snapshots is not None:
            copy_rows(snapshots, parts["restore_from"], live, parts["restore_to"])
        parts["input_ids"] = self._last_tokens.fill_in(bucket, parts)
        self._context.begin(model_input(self._chunks, bucket, parts, self._rules))
        logits = self._controller.forward()
        assert logits is not None, "the last stage is here"
        if live is not None and snapshots is not None:
            copy_rows(live, parts["copy_from"], snapshots, parts["copy_to"])
        return logits[0]


class _Held:
    """A program, and what it gave last: the same tensor each time where it is a graph."""

    def __init__(self, program: Callable[[], Tensor]) -> None:
        self._program = program
        self.value = program()

    def run(self) -> Tensor:
        """Run it."""
        self.value = self._program()
        return self.value
