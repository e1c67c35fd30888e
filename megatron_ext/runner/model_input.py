"""One step's message as tensors: what goes to the device, once, before the forward."""

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
from megatron_ext.ops.transfer import to_device
from megatron_ext.ops.varlen import PackedChunks, Resumes, stage_arrays
from megatron_ext.ops.varlen import starts as running_starts
from megatron_ext.runner.block_rows import BlockRows
from megatron_ext.scheduling.step import LAST_SAMPLED, Sampling, ScheduledChunk, ScheduledStep

_LIVE_SLOT: Final = attrgetter("running_slot")


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


class SamplingRow(NamedTuple):
    """Whose next token a row of the step's logits is, how it is chosen, and how many drafts are assumed to come."""

    request_id: int
    sampling: Sampling
    drafts: int = 0


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


def stage_step(
    step: ScheduledStep,
    rules: StagingRules,
    last_sampled: SampledTokens | None = None,
    block_rows: BlockRows | None = None,
) -> ModelInput:
    """Stage a step, in one copy but for what a prefill adds. Padding repeats token 0 at position 0.

    Args:
        step: The message; nothing else is read.
        rules: Of pools and model.
        last_sampled: Of the step before, for chunks that begin with `LAST_SAMPLED`.
        block_rows: Block tables of steps before, whose rows are used again; none if missing.
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
        input_ids=_fill_in(staged["input_ids"], tokens["input_ids"], chunks, firsts, last_sampled),
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
    """Packed tokens that a next one is drawn behind, where some chunks end with drafts: [m]."""
    ends = [(chunk, int(end)) for chunk, end in zip(chunks, firsts[1:], strict=True) if chunk.sampling is not None]
    return np.concatenate([np.arange(end - 1 - len(chunk.target_sampling), end) for chunk, end in ends])


def stage_tokens(
    chunks: Sequence[ScheduledChunk],
    table: np.ndarray,
    starts: Sequence[int],
    firsts: np.ndarray,
    rules: StagingRules,
) -> dict[str, np.ndarray]:
    """What there is for each token of the packed axis, all chunks at once; the first two with padding.

    KV goes to the token's place in its block; what lies in shared blocks already goes to the dummy block (KV-3).
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


def _fill_in(
    input_ids: Tensor,
    token_ids: np.ndarray,
    chunks: Sequence[ScheduledChunk],
    firsts: np.ndarray,
    last_sampled: SampledTokens | None,
) -> Tensor:
    """Put tokens that the host does not know into their places, from device to device."""
    places = np.flatnonzero(token_ids == LAST_SAMPLED)
    if not len(places):
        return input_ids
    assert last_sampled is not None, "no step has sampled anything"
    owners = np.searchsorted(firsts, places, side="right") - 1
    rows = [last_sampled.rows[chunks[owner].request_id] for owner in owners]
    index, source = _to_device([places, np.asarray(rows)], input_ids.device)
    return input_ids.index_copy(0, index, last_sampled.tokens.index_select(0, source))


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
    """Ascending slots without a gap as a slice; None if there are none, or a gap."""
    if not slots or slots[-1] - slots[0] != len(slots) - 1:
        return None
    return slice(slots[0], slots[-1] + 1)


def _stage_snapshots(
    prefill: Sequence[ScheduledChunk], keeps: Sequence[bool], packed: PackedChunks, rules: StagingRules
) -> SnapshotPlaces | None:
    """Where in the packed prefill the wanted states arise: each is the end of a kernel chunk (HY-9).

    Those of chunks that keep none inside are copied when the forward is over (see `StagingRules`).
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
    """Which packed tokens score prompt tokens, and whose; `firsts` are where the chunks begin."""
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
    """Integer arrays as int64 tensors, in one copy."""
    flat = torch.from_numpy(np.concatenate([array.astype(np.int64) for array in arrays]))
    return to_device(flat, device).split([len(array) for array in arrays])
