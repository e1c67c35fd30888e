"""Input tensors of an eager step, copied to the device once, before the forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.mixers.chunk_metadata import cut_prefill
from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.ops.paged_attention import PagedBatch
from megatron_ext.ops.state_slots import SnapshotPlaces, StateSlots
from megatron_ext.ops.step_metadata import to_device
from megatron_ext.ops.varlen import PackedChunks, Resumes, stage_arrays
from megatron_ext.ops.varlen import starts as running_starts
from megatron_ext.runner.block_rows import BlockRows
from megatron_ext.scheduling.step import Sampling, ScheduledChunk, ScheduledStep

_LIVE_SLOT: Final = attrgetter("running_slot")


@dataclass(frozen=True)
class StagingRules:
    """Constants of pools and model that staging needs.

    Attributes:
        block_size: Tokens of a block.
        dummy_block: Block for K/V that must not be written to the cache.
        kernel_chunk: Maximum number of tokens of a kernel chunk.
        has_states: True if this rank has recurrent layers.
        token_rounder: The packed token count is padded to a multiple of this.
        snapshots_in_prefill: True if mixers keep states inside a prefill; otherwise the caller copies running states.
        device: Device of the tensors.
    """

    block_size: int
    dummy_block: int
    kernel_chunk: int
    has_states: bool
    token_rounder: int
    snapshots_in_prefill: bool
    device: torch.device


class SamplingRow(NamedTuple):
    """Row of the step's logits: its request, its sampling options, and the number of drafts it assumes accepted."""

    request_id: int
    sampling: Sampling
    drafts: int = 0


@dataclass(frozen=True)
class PromptScore:
    """Span of the step's scored tokens that belongs to one request (prompt log-probs)."""

    request_id: int
    rows: slice  # into `ModelInput.score_tokens`
    targets: tuple[int, ...]  # the token that each row should predict
    top_n: int


@dataclass(frozen=True)
class ModelInput:
    """A step's chunks, packed as [decode | prefill | padding] on the token axis.

    T is the padded token count. The forward computes logits for `sample_tokens` only, m rows of the packed axis; those
    of the k `score_tokens` come after it, a few at a time.
    """

    chunks: tuple[ScheduledChunk, ...]  # as packed
    num_decode: int
    num_tokens: int  # without padding
    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, absolute
    slot_mapping: Tensor  # [num_tokens] int64, index into the cache flattened over blocks and places
    paged_batch: PagedBatch
    recurrent: RecurrentStep | None  # None for models without recurrent layers
    sample_tokens: Tensor  # [m] int64, packed tokens whose logits are sampled
    sampling: tuple[SamplingRow, ...]  # one for each of them
    score_tokens: Tensor  # [k] int64, packed tokens whose logits score the prompt token after them
    prompt_scores: tuple[PromptScore, ...]


def stage_step(
    step: ScheduledStep,
    rules: StagingRules,
    block_rows: BlockRows | None = None,
) -> ModelInput:
    """Stage a step, in one copy except for what a prefill adds. Padding repeats token 0 at position 0.

    Args:
        step: Scheduled step; nothing else is read.
        rules: Constants of pools and model.
        block_rows: Block table rows of previous steps to reuse; None to write all rows.
    """
    num_decode = step.num_decode
    chunks = (*sorted(step.chunks[:num_decode], key=_LIVE_SLOT), *step.chunks[num_decode:])
    starts, ends = [chunk.start for chunk in chunks], [chunk.end for chunk in chunks]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    slots = [chunk.running_slot for chunk in chunks]
    table = (block_rows or BlockRows()).of(slots, [chunk.block_ids for chunk in chunks])
    assert (np.asarray([len(chunk.block_ids) for chunk in chunks]) * rules.block_size >= ends).all(), "keys nowhere"
    firsts = running_starts(lengths)
    tokens = stage_tokens(chunks, table, starts, firsts, rules)
    sampled = [i for i, chunk in enumerate(chunks) if chunk.sampling is not None]
    verifying = any(chunk.target_sampling for chunk in chunks)
    score_tokens, scores = _choose_scored(chunks[num_decode:], firsts[num_decode:])
    facts = {
        "block_table": table,
        "cu_seqlens_q": firsts,
        "seqlens_k": np.asarray(ends),
        "slots": np.asarray(slots),
        "has_state": np.asarray(starts) > 0,
        "sample_tokens": _verified_tokens(chunks, firsts) if verifying else firsts[1:][sampled] - 1,
        "score_tokens": np.asarray(score_tokens, dtype=np.int64),
    }
    staged = stage_arrays(tokens | facts, rules.device)
    where = {name: staged[name] for name in ("block_table", "cu_seqlens_q", "seqlens_k")}
    return ModelInput(
        chunks=chunks,
        num_decode=num_decode,
        num_tokens=int(firsts[-1]),
        input_ids=staged["input_ids"],
        position_ids=staged["position_ids"],
        slot_mapping=staged["slot_mapping"],
        paged_batch=PagedBatch(num_decode, tuple(lengths), tuple(ends), rules.block_size, **where),
        recurrent=_stage_recurrent(chunks, num_decode, slots, staged, rules) if rules.has_states else None,
        sample_tokens=staged["sample_tokens"],
        sampling=tuple([row for i in sampled for row in _sampling_rows(chunks[i])]),
        score_tokens=staged["score_tokens"],
        prompt_scores=tuple(scores),
    )


def _sampling_rows(chunk: ScheduledChunk) -> tuple[SamplingRow, ...]:
    assert chunk.sampling is not None, "it yields a token"
    name, behind = chunk.request_id, chunk.target_sampling
    first = SamplingRow(name, chunk.sampling)
    return (first, *(SamplingRow(name, one, i) for i, one in enumerate(behind, start=1))) if behind else (first,)


def _verified_tokens(chunks: Sequence[ScheduledChunk], firsts: np.ndarray) -> np.ndarray:
    """Return the packed tokens whose logits are sampled, for steps where some chunks end with drafts: [m]."""
    ends = [(chunk, int(end)) for chunk, end in zip(chunks, firsts[1:], strict=True) if chunk.sampling is not None]
    return np.concatenate([np.arange(end - 1 - len(chunk.target_sampling), end) for chunk, end in ends])


def stage_tokens(
    chunks: Sequence[ScheduledChunk],
    table: np.ndarray,
    starts: Sequence[int],
    firsts: np.ndarray,
    rules: StagingRules,
) -> dict[str, np.ndarray]:
    """Return the arrays with an entry per packed token; the ids and positions are padded.

    KV goes to the token's place in its block; KV that shared blocks already hold goes to the dummy block (KV-3).
    """
    total, lengths = int(firsts[-1]), np.diff(firsts)
    padded = total + -total % rules.token_rounder
    token_ids, positions = np.zeros((2, padded), dtype=np.int64)
    token_ids[:total] = np.fromiter(chain.from_iterable([chunk.token_ids for chunk in chunks]), np.int64, total)
    positions[:total] = np.arange(total) + np.repeat(starts - firsts[:-1], lengths)
    known, owners = positions[:total], np.repeat(np.arange(len(chunks)), lengths)
    shared_ends = np.asarray([chunk.shared_end for chunk in chunks])
    blocks, places = np.divmod(known, rules.block_size)
    blocks = np.where(known < shared_ends[owners], rules.dummy_block, table[owners, blocks])
    return {"input_ids": token_ids, "position_ids": positions, "slot_mapping": blocks * rules.block_size + places}


def _stage_recurrent(
    chunks: Sequence[ScheduledChunk],
    num_decode: int,
    slots: Sequence[int],
    staged: Mapping[str, Tensor],
    rules: StagingRules,
) -> RecurrentStep:
    prefill = chunks[num_decode:]
    decode_slots = _as_slice(slots[:num_decode]) or staged["slots"][:num_decode]
    if not prefill:
        return RecurrentStep(num_decode, decode_slots, None, None)
    keeps = [rules.snapshots_in_prefill or bool(c.target_sampling) for c in prefill]
    stops = [
        sorted({one.position for one in c.snapshots}) if kept else [] for c, kept in zip(prefill, keeps, strict=True)
    ]
    starts, lengths = [c.start for c in prefill], [c.length for c in prefill]
    packed = cut_prefill(starts, lengths, rules.kernel_chunk, stops, rules.device)
    packed = replace(packed, resumes=Resumes(rules.block_size, staged["seqlens_k"][num_decode:]))
    snapshots = _stage_snapshots(prefill, keeps, packed, rules)
    prefill_slots = StateSlots(staged["slots"][num_decode:], staged["has_state"][num_decode:].bool(), snapshots)
    return RecurrentStep(num_decode, decode_slots, packed, prefill_slots)


def _as_slice(slots: Sequence[int]) -> slice | None:
    """Return ascending slots without a gap as a slice; None if `slots` is empty or has a gap."""
    if not slots or slots[-1] - slots[0] != len(slots) - 1:
        return None
    return slice(slots[0], slots[-1] + 1)


def _stage_snapshots(
    prefill: Sequence[ScheduledChunk], keeps: Sequence[bool], packed: PackedChunks, rules: StagingRules
) -> SnapshotPlaces | None:
    """Return the places in the packed prefill where kept states arise: each is the end of a kernel chunk (HY-9).

    States of chunks that keep none inside are copied after the forward (see `StagingRules`).
    """
    slots, sequences, tokens = [], [], []
    first_token = 0
    for i, chunk in enumerate(prefill):
        for snapshot in chunk.snapshots if keeps[i] else ():
            slots.append(snapshot.slot)
            sequences.append(i)
            tokens.append(first_token + snapshot.position - chunk.start)
        first_token += chunk.length
    if not slots:
        return None
    chunks = np.searchsorted(np.cumsum(packed.chunk_lengths), tokens)
    return SnapshotPlaces(
        *_to_device([np.asarray(slots), np.asarray(sequences), chunks, np.asarray(tokens)], rules.device)
    )


def _choose_scored(
    prefill: Sequence[ScheduledChunk], firsts: Sequence[int] | np.ndarray
) -> tuple[list[int], list[PromptScore]]:
    """Return the packed tokens that score prompt tokens, and the span of each request; `firsts` are chunk starts."""
    tokens: list[int] = []
    scores: list[PromptScore] = []
    for chunk, first in zip(prefill, firsts, strict=False):
        wanted = chunk.scoring
        if wanted is not None:
            rows = slice(len(tokens), len(tokens) + wanted.end - wanted.start)
            scores.append(PromptScore(chunk.request_id, rows, wanted.targets, wanted.top_n))
            tokens += range(int(first) + wanted.start - chunk.start, int(first) + wanted.end - chunk.start)
    return tokens, scores


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[Tensor]:
    """Return integer arrays as int64 tensors, in one copy."""
    flat = torch.from_numpy(np.concatenate([array.astype(np.int64) for array in arrays]))
    return to_device(flat, device).split([len(array) for array in arrays])
