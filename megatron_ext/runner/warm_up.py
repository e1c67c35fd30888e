"""Steps of a warm-up: dummy requests that launch every kernel variant which an engine's requests can launch.

Triton compiles a kernel for each combination of configuration, types and alignments, see `Kernel.specialization`.
Launchers choose the first two by the model's shapes, and copies of states also by their number. Alignments follow from
the model's shapes and from a few properties of a step, its *class*. `step_classes` lists all classes:

- The inputs of a prefill begin after the tokens that decode, so their alignment depends on the number of these modulo
  the elements in 16 bytes. The inputs of decodes come first.
- Temporary tensors that share an allocation begin at multiples of the tokens of the prefill; one token has 4 bytes at
  least in each of them.
- A tensor with a single row may have another stride than one with several.
- A prefill that keeps states has strides of the snapshot pool, others of the running states.
- Draws read the logits as they are, or in fp32 if they are processed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megatron_ext.memory.engine_plan import EnginePlan
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.runner.input_writer import StagingRules
from megatron_ext.scheduling.running_slots import RunningSlot
from megatron_ext.scheduling.snapshots.snapshot_positions import Snapshot
from megatron_ext.scheduling.step import Sampling, ScheduledChunk, ScheduledStep

ALIGNMENT: Final = 16
"""Bytes: Triton distinguishes tensors that begin at multiples of this from others."""
_SMALLEST_TEMPORARY: Final = 4  # bytes of one token in temporary tensors of a prefill, which are fp32
_SHORT: Final = 64
"""Tokens of a short prefill after a long prefix, whose keys are split."""
_NAME: Final = BlockHash(b"warm-up")

GREEDY: Final = Sampling(temperature=0.0, top_k=1, top_p=0.0, uniform=None, forbidden=(), top_n=None)
DRAWN: Final = Sampling(temperature=1.0, top_k=0, top_p=0.0, uniform=0.5, forbidden=(), top_n=None)
PROCESSED: Final = Sampling(temperature=1.0, top_k=0, top_p=0.0, uniform=0.5, forbidden=(0,), top_n=None)


@dataclass(frozen=True)
class StepClass:
    """Properties of a step that decide which kernel variants it launches.

    Attributes:
        decodes: Requests that decode.
        tokens: Tokens of the prefill; 0 for a step that only decodes.
        keeps: True if the prefill keeps states before its last token.
        sampling: Sampling options of the decodes.
    """

    decodes: int
    tokens: int = 0
    keeps: bool = False
    sampling: Sampling = GREEDY


def step_classes(plan: EnginePlan, rules: StagingRules) -> Iterator[StepClass]:
    """Yield every class that steps within the limits of a plan can have."""
    limits, keeping = plan.limits, (False, True) if _snapshot_slot(plan, rules) is not None else (False,)
    for decodes in range(1, min(2, limits.max_requests) + 1):
        yield from (StepClass(decodes, sampling=one) for one in (GREEDY, DRAWN, PROCESSED))
    most_tokens = min(limits.max_tokens, limits.max_model_len)
    for decodes in range(min(ALIGNMENT // plan.shape.dtype.itemsize, limits.max_requests)):
        for tokens in range(1, min(ALIGNMENT // _SMALLEST_TEMPORARY + 1, most_tokens - decodes) + 1):
            yield from (StepClass(decodes, tokens, keeps) for keeps in keeping if tokens > keeps)


def warm_up_steps(plan: EnginePlan, rules: StagingRules) -> list[ScheduledStep]:
    """Return a step of every class; they write to the dummy block, running state slots and one snapshot slot."""
    return [_step(one, plan, rules) for one in step_classes(plan, rules)]


def full_steps(plan: EnginePlan, rules: StagingRules) -> list[ScheduledStep]:
    """Return the steps whose temporary tensors are the largest; they write to the same places as `warm_up_steps`.

    One has prefills of as many tokens as a step may have. The others end where the longest request ends: a short
    prefill, and decodes of as many requests as may run.
    """
    limits = plan.limits
    longest, requests = limits.max_model_len, limits.max_requests
    lengths = [min(longest, limits.max_tokens - first) for first in range(0, limits.max_tokens, longest)][:requests]
    prefills = [_chunk(slot, tokens, rules, sampling=PROCESSED) for slot, tokens in enumerate(lengths)]
    short = _chunk(0, min(_SHORT, limits.max_tokens, longest), rules, end=longest)
    decodes = [_chunk(slot, 1, rules, end=longest, is_decode=True, sampling=PROCESSED) for slot in range(requests)]
    return [
        ScheduledStep(tuple(prefills), 0),
        ScheduledStep((short,), 0),
        ScheduledStep(tuple(decodes), len(decodes)),
    ]


def _step(kind: StepClass, plan: EnginePlan, rules: StagingRules) -> ScheduledStep:
    decodes = [_chunk(slot, 1, rules, sampling=kind.sampling, is_decode=True) for slot in range(kind.decodes)]
    if not kind.tokens:
        return ScheduledStep(tuple(decodes), kind.decodes)
    slot = _snapshot_slot(plan, rules)
    kept = (Snapshot(1, _NAME, slot),) if kind.keeps and slot is not None else ()
    drafts = (GREEDY,) if kept and not rules.snapshots_in_prefill else ()
    prefill = _chunk(kind.decodes, kind.tokens, rules, snapshots=kept, target_sampling=drafts)
    return ScheduledStep((*decodes, prefill), kind.decodes)


def _chunk(
    slot: int,
    tokens: int,
    rules: StagingRules,
    *,
    end: int | None = None,
    is_decode: bool = False,
    sampling: Sampling = GREEDY,
    snapshots: tuple[Snapshot, ...] = (),
    target_sampling: tuple[Sampling, ...] = (),
) -> ScheduledChunk:
    end = tokens if end is None else end
    blocks = (BlockId(rules.dummy_block),) * -(-end // rules.block_size)
    return ScheduledChunk(
        request_id=slot,
        token_ids=(0,) * tokens,
        start=end - tokens,
        end=end,
        is_decode=is_decode,
        block_ids=blocks,
        shared_end=0,
        running_slot=RunningSlot(slot),
        snapshots=snapshots,
        sampling=sampling,
        target_sampling=target_sampling,
    )


def _snapshot_slot(plan: EnginePlan, rules: StagingRules) -> SlotId | None:
    """Return a slot for states that a prefill keeps; None if none does.

    Prefills whose mixers keep no states inside keep those after drafts.
    """
    if not rules.has_states:
        return None
    if rules.snapshots_in_prefill and plan.snapshot_slots:
        return SlotId(0)
    return SlotId(plan.first_apart_slot) if plan.geometry.draft_states else None
