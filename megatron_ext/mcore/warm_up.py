"""Warm-up before the first request: compile every kernel variant that requests can launch, and load libraries.

On CUDA a profile run follows: the largest steps are computed, so that memory which they lack is found at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from tqdm import tqdm

from megatron_ext.mcore.context import InferenceContext
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.step_executor import StepExecutor
from megatron_ext.memory.budget import GIB
from megatron_ext.memory.host_limits import allocating
from megatron_ext.memory.pools import Pools
from megatron_ext.memory.state_pool import StatePool, copy_rows
from megatron_ext.ops import triton
from megatron_ext.ops.backends import preferring
from megatron_ext.runner.warm_up import full_steps, warm_up_steps
from megatron_ext.scheduling.step import ScheduledStep

logger = logging.getLogger(__name__)

Phase = Callable[[str], AbstractContextManager[None]]
PHASE, PROFILE = "warm-up", "profile run"
_LESS = "give a smaller --inference-dynamic-batching-buffer-size-gb"


def unreported(name: str) -> AbstractContextManager[None]:
    """Return a context that does nothing: the phase `name` is not reported."""
    return nullcontext()


@dataclass(frozen=True)
class WarmUpPart:
    """Model whose kernels are warmed up, with its pools.

    Attributes:
        context: Context with the pools, which no request uses yet.
        run: Computes a step with them.
        operators: Backend name of the operators, or AUTO.
    """

    context: InferenceContext
    run: Callable[[ScheduledStep], object]
    operators: str

    @classmethod
    def of(cls, context: InferenceContext, controller: InferenceController) -> WarmUpPart:
        """Return the part of a context and a controller."""
        return cls(context, StepExecutor(context, controller).compute_eagerly, controller.operators)

    @property
    def is_needed(self) -> bool:
        """True if kernels are compiled at their first launch."""
        return triton.compiles(self.context.staging_rules.device, self.operators)

    def tasks(self) -> Iterator[Callable[[], object]]:
        """Yield functions that together launch every kernel variant."""
        for step in warm_up_steps(self.context.plan, self.context.staging_rules):
            yield partial(self._compute, step)
        yield from _copies(self.context.allocated, self.context.plan.limits.max_requests)

    def largest_bytes(self) -> int:
        """Compute the largest steps on a CUDA device; return the most bytes that their temporary tensors took."""
        device = self.context.staging_rules.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        for step in full_steps(self.context.plan, self.context.staging_rules):
            self._compute(step)
        return torch.cuda.max_memory_allocated(device) - before

    def _compute(self, step: ScheduledStep) -> None:
        self.run(step)
        snapshots = self.context.allocated.snapshots
        if snapshots is not None:  # their contents belong to no request
            snapshots.open([one.slot for chunk in step.chunks for one in chunk.snapshots])


def warm_up(parts: Sequence[WarmUpPart], phase: Phase = unreported, *, is_visible: bool = True) -> None:
    """Launch every kernel variant once where kernels are compiled, then make the profile run; nothing on CPUs.

    All ranks of a world call this together, before any request: the steps communicate like others.

    Args:
        parts: Models of this rank, the model that answers requests first.
        phase: Returns the context of a phase by its name.
        is_visible: Whether this process may draw a progress bar.

    Raises:
        ConfigError: The pools leave too little memory.
    """
    needed = [part for part in parts if part.is_needed]
    if needed:
        with phase(PHASE), allocating("a warm-up of all kernels", lambda: _LESS):
            run_tasks(needed, is_visible=is_visible)
    profile(parts[0], phase)


def profile(part: WarmUpPart, phase: Phase = unreported) -> None:
    """Compute the largest steps on CUDA, in a phase of the start, and log the bytes that they take; nothing on CPUs.

    The memory stays with the allocator for later steps.

    Args:
        part: Model of this rank that answers requests.
        phase: Returns the context of a phase by its name.

    Raises:
        ConfigError: The pools leave too little memory.
    """
    context = part.context
    if context.staging_rules.device.type != "cuda":
        return
    purpose = f"temporary tensors of a step of {context.max_tokens} tokens"
    with phase(PROFILE), allocating(purpose, lambda: f"{_LESS}, or fewer --inference-dynamic-batching-max-tokens"):
        with torch.inference_mode(), preferring(part.operators):
            taken = part.largest_bytes()
        context.reset()
    counted = context.plan.activation_bytes
    logger.log(
        logging.INFO if taken <= counted else logging.WARNING,
        "temporary tensors of the largest steps take %.2f GB; %.2f GB were counted for them",
        taken / GIB,
        counted / GIB,
    )


def run_tasks(parts: Sequence[WarmUpPart], *, is_visible: bool = True) -> None:
    """Run the tasks of all parts, with a progress bar on a terminal."""
    tasks = [(part, task) for part in parts for task in part.tasks()]
    hidden = None if is_visible else True
    with torch.inference_mode():
        for part, task in tqdm(tasks, desc=PHASE, unit="step", leave=False, disable=hidden):
            with preferring(part.operators):
                task()
    for part in parts:
        part.context.reset()  # a drafter has taken note of the dummy requests


def _copies(pools: Pools, requests: int) -> Iterator[Callable[[], None]]:
    """Yield copies of padding between all pools of states, in numbers that take every variant; they write nothing."""
    from megatron_ext.ops.state_copy.kernels import pair_counts

    states = [one for one in (pools.live_states, pools.snapshots) if one is not None and one.conv.shape[1]]
    for source, target in product(states, states):
        for count in pair_counts(requests):
            yield partial(_copy_padding, source, target, count)


def _copy_padding(source: StatePool, target: StatePool, count: int) -> None:
    rows = torch.full((count,), -1, device=source.conv.device)
    copy_rows(source, rows, target, rows)
