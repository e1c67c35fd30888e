"""One step's message as tensors: what goes to the device, once, before the forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.mixers.chunk_metadata import cut_prefill
from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.ops.paged_attention import PagedBatch, build_paged_batch
from megatron_ext.ops.state_slots import SnapshotPlaces, StateSlots
from megatron_ext.ops.varlen import PackedChunks
from megatron_ext.scheduling.step import LAST_SAMPLED, Sampling, ScheduledChunk, ScheduledStep


@dataclass(frozen=True)
class StagingRules:
    """What staging knows of pools and model; constant.

    Attributes:
        block_size: Tokens.
        dummy_block: Where K/V goes that is not to be written.
        kernel_chunk: Tokens of a kernel chunk at most.
        has_states: Whether there are recurrent layers on this rank.
        token_rounder: The packed token count is padded to a multiple of this.
        snapshots_in_prefill: Whether mixers keep states inside a prefill; otherwise the caller copies live ones.
        device: Where the tensors go.
    """

    block_size: int
    dummy_block: int
    kernel_chunk: int
    has_states: bool
    token_rounder: int
    snapshots_in_prefill: bool
    device: torch.device


@dataclass(frozen=True)
class SampledTokens:
    """The tokens that a step sampled, where they are: [m] int64, and the row of each request."""

    tokens: Tensor
    rows: Mapping[int, int]


@dataclass(frozen=True)
class SamplingRow:
    """Whose next token a row of the step's logits is, and how it is chosen."""

    request_id: int
    sampling: Sampling


@dataclass(frozen=True)
class PromptScore:
    """A span of the step's scored tokens that belongs to one request (prompt log-probs)."""

    request_id: int
    rows: slice  # of `ModelInput.score_tokens`
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
    sample_tokens: Tensor  # [m] int64, those that a next token is drawn behind
    sampling: tuple[SamplingRow, ...]  # of each of them
    score_tokens: Tensor  # [k] int64, those whose logits score the prompt token behind them
    prompt_scores: tuple[PromptScore, ...]


def stage_step(step: ScheduledStep, rules: StagingRules, last_sampled: SampledTokens | None = None) -> ModelInput:
    """Stage a step. Padding repeats token 0 at position 0.

    Args:
        step: The message; nothing else is read.
        rules: Of pools and model.
        last_sampled: Of the step before, for chunks that begin with `LAST_SAMPLED`.
    """
    decodes = sorted(step.chunks[: step.num_decode], key=lambda chunk: chunk.live_slot)
    chunks = (*decodes, *step.chunks[step.num_decode :])
    positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
    padding = -step.num_tokens % rules.token_rounder
    token_ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks] + [np.zeros(padding)])
    position_ids = np.concatenate([*positions, np.zeros(padding)])
    slot_mapping = np.concatenate([_slot_mapping(*pair, rules) for pair in zip(chunks, positions, strict=True)])
    sample_tokens, score_tokens, scores = _choose_logits(chunks)
    arrays = [token_ids, position_ids, slot_mapping, np.asarray(sample_tokens), np.asarray(score_tokens)]
    staged = _to_device(arrays, rules.device)
    return ModelInput(
        chunks=chunks,
        num_decode=step.num_decode,
        num_tokens=step.num_tokens,
        input_ids=_fill_in(staged[0], chunks, last_sampled),
        position_ids=staged[1],
        slot_mapping=staged[2],
        paged_batch=build_paged_batch(
            [chunk.block_ids for chunk in chunks],
            [chunk.length for chunk in chunks],
            [chunk.end for chunk in chunks],
            step.num_decode,
            rules.block_size,
            rules.device,
        ),
        recurrent=_stage_recurrent(chunks, step.num_decode, rules) if rules.has_states else None,
        sample_tokens=staged[3],
        sampling=tuple(SamplingRow(one.request_id, one.sampling) for one in chunks if one.sampling is not None),
        score_tokens=staged[4],
        prompt_scores=tuple(scores),
    )


def _fill_in(input_ids: Tensor, chunks: Sequence[ScheduledChunk], last_sampled: SampledTokens | None) -> Tensor:
    """Put tokens that the host does not know into their places, from device to device."""
    places: list[int] = []
    names: list[int] = []  # of requests
    first = 0
    for chunk in chunks:
        if chunk.token_ids[-1] == LAST_SAMPLED:  # nothing can follow it
            places.append(first + chunk.length - 1)
            names.append(chunk.request_id)
        first += chunk.length
    if not places:
        return input_ids
    assert last_sampled is not None, "no step has sampled anything"
    rows = [last_sampled.rows[name] for name in names]
    index, source = _to_device([np.asarray(places), np.asarray(rows)], input_ids.device)
    return input_ids.index_copy(0, index, last_sampled.tokens.index_select(0, source))


def _slot_mapping(chunk: ScheduledChunk, positions: np.ndarray, rules: StagingRules) -> np.ndarray:
    """Where the chunk's KV is written; what lies in shared blocks already goes to the dummy block (KV-3)."""
    blocks = np.asarray(chunk.block_ids)[positions // rules.block_size]
    blocks = np.where(positions < chunk.shared_end, rules.dummy_block, blocks)
    return blocks * rules.block_size + positions % rules.block_size


def _stage_recurrent(chunks: Sequence[ScheduledChunk], num_decode: int, rules: StagingRules) -> RecurrentStep:
    prefill = chunks[num_decode:]
    slots = np.asarray([chunk.live_slot for chunk in chunks])
    has_state = np.asarray([chunk.start > 0 for chunk in chunks])
    staged_slots, staged_has_state = _to_device([slots, has_state], rules.device)
    decode_slots = _as_slice(slots[:num_decode]) or staged_slots[:num_decode]
    if not prefill:
        return RecurrentStep(num_decode, decode_slots, None, None)
    stops = [sorted({one.position for one in c.snapshots}) if rules.snapshots_in_prefill else [] for c in prefill]
    starts, lengths = [c.start for c in prefill], [c.length for c in prefill]
    packed = cut_prefill(starts, lengths, rules.kernel_chunk, stops, rules.device)
    snapshots = _stage_snapshots(prefill, packed, rules) if rules.snapshots_in_prefill else None
    prefill_slots = StateSlots(staged_slots[num_decode:], staged_has_state[num_decode:].bool(), snapshots)
    return RecurrentStep(num_decode, decode_slots, packed, prefill_slots)


def _as_slice(slots: np.ndarray) -> slice | None:
    """Ascending slots without a gap as a slice; None if there are none, or a gap."""
    if len(slots) == 0 or slots[-1] - slots[0] != len(slots) - 1:
        return None
    return slice(int(slots[0]), int(slots[-1]) + 1)


def _stage_snapshots(
    prefill: Sequence[ScheduledChunk], packed: PackedChunks, rules: StagingRules
) -> SnapshotPlaces | None:
    """Where in the packed prefill the wanted states arise: each is the end of a kernel chunk (HY-9)."""
    slots, sequences, tokens = [], [], []
    first_token = 0
    for i, chunk in enumerate(prefill):
        for snapshot in chunk.snapshots:
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


def _choose_logits(chunks: Sequence[ScheduledChunk]) -> tuple[list[int], list[int], list[PromptScore]]:
    """Which packed tokens are sampled from, which score prompt tokens, and whose."""
    sample_tokens: list[int] = []
    score_tokens: list[int] = []
    scores: list[PromptScore] = []
    first_token = 0
    for chunk in chunks:
        wanted = chunk.scoring
        if wanted is not None:
            rows = slice(len(score_tokens), len(score_tokens) + wanted.end - wanted.start)
            scores.append(PromptScore(chunk.request_id, rows, wanted.targets, wanted.top_n))
            score_tokens += range(first_token + wanted.start - chunk.start, first_token + wanted.end - chunk.start)
        first_token += chunk.length
        if chunk.sampling is not None:
            sample_tokens.append(first_token - 1)
    return sample_tokens, score_tokens, scores


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[Tensor]:
    """Integer arrays as int64 tensors, in one copy."""
    flat = torch.from_numpy(np.concatenate([array.astype(np.int64) for array in arrays]))
    return flat.to(device, non_blocking=True).split([len(array) for array in arrays])
