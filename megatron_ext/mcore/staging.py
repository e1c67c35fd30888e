"""One step's decisions as tensors: what goes to the device, once, before the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.mixers.chunk_metadata import cut_chunks
from megatron_ext.mixers.recurrent import RecurrentStep, SnapshotPlaces
from megatron_ext.ops.paged_attention import PagedLayout, build_paged_layout
from megatron_ext.ops.varlen import PackedChunks
from megatron_ext.scheduling.request import Chunk
from megatron_ext.scheduling.snapshots import Snapshot


@dataclass(frozen=True)
class PromptScore:
    """A span of the step's scored tokens that belongs to one request (prompt log-probs)."""

    chunk: Chunk
    rows: slice  # of `StagedStep.score_tokens`
    targets: tuple[int, ...]  # the token that each row should predict


@dataclass(frozen=True)
class StagedStep:
    """A step's chunks, packed as [decode | prefill | padding] on the token axis.

    T is the padded token count. The forward computes logits for `sample_tokens` only, m rows of the packed axis; those
    of the k `score_tokens` come after it, a few at a time.
    """

    chunks: tuple[Chunk, ...]
    num_decode: int
    num_tokens: int  # without padding
    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, absolute
    kv_places: Tensor  # [num_tokens] int64, index into the cache flattened over blocks and places
    paged_layout: PagedLayout
    recurrent: RecurrentStep | None  # None for models without recurrent layers
    sample_tokens: Tensor  # [m] int64, those that a next token is drawn behind
    sampling_chunks: tuple[Chunk, ...]  # whose token each of them is
    score_tokens: Tensor  # [k] int64, those whose logits score the prompt token behind them
    prompt_scores: tuple[PromptScore, ...]


def stage_step(
    chunks: Sequence[Chunk],
    *,
    block_size: int,
    dummy_block: int,
    kernel_chunk: int,
    is_hybrid: bool,
    token_rounder: int,
    device: torch.device,
    snapshots_in_prefill: bool = True,
) -> StagedStep:
    """Stage `chunks`, decodes first. Padding to a multiple of `token_rounder` repeats token 0 at position 0.

    Without `snapshots_in_prefill` the recurrent layers keep no states: the caller copies live ones.
    """
    num_decode = sum(chunk.is_decode for chunk in chunks)
    assert all(chunk.is_decode for chunk in chunks[:num_decode]), "decodes come first"
    decodes = sorted(chunks[:num_decode], key=lambda chunk: chunk.request.state_row)
    chunks = [*decodes, *chunks[num_decode:]]
    positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
    num_tokens = sum(chunk.length for chunk in chunks)
    padding = -num_tokens % token_rounder
    input_ids = np.concatenate([chunk.request.tokens[chunk.start : chunk.end] for chunk in chunks] + [[0] * padding])
    position_ids = np.concatenate([*positions, np.zeros(padding)])
    tables = [_block_table(chunk, block_size) for chunk in chunks]
    places = [
        _kv_places(chunk, table, position, block_size, dummy_block)
        for chunk, table, position in zip(chunks, tables, positions, strict=True)
    ]
    sample_tokens, score_tokens, scores = _choose_logits(chunks)
    arrays = [input_ids, position_ids, np.concatenate(places), np.asarray(sample_tokens), np.asarray(score_tokens)]
    staged = _to_device(arrays, device)
    return StagedStep(
        chunks=tuple(chunks),
        num_decode=num_decode,
        num_tokens=num_tokens,
        input_ids=staged[0],
        position_ids=staged[1],
        kv_places=staged[2],
        paged_layout=build_paged_layout(
            tables, [c.length for c in chunks], [c.end for c in chunks], num_decode, block_size, device
        ),
        recurrent=_stage_recurrent(chunks, num_decode, kernel_chunk, device, snapshots_in_prefill)
        if is_hybrid
        else None,
        sample_tokens=staged[3],
        sampling_chunks=tuple(chunk for chunk in chunks if chunk.yields_token),
        score_tokens=staged[4],
        prompt_scores=tuple(scores),
    )


def _block_table(chunk: Chunk, block_size: int) -> list[int]:
    """The blocks that hold tokens [0, chunk.end); a request may own more."""
    return list(chunk.request.block_table[: -(-chunk.end // block_size)])


def _kv_places(
    chunk: Chunk, table: Sequence[int], positions: np.ndarray, block_size: int, dummy_block: int
) -> np.ndarray:
    """Where the chunk's KV is written; what lies in shared blocks already goes to the dummy block (KV-3)."""
    blocks = np.asarray(table)[positions // block_size]
    blocks = np.where(positions < chunk.request.shared_end, dummy_block, blocks)
    return blocks * block_size + positions % block_size


def _stage_recurrent(
    chunks: Sequence[Chunk], num_decode: int, kernel_chunk: int, device: torch.device, with_snapshots: bool
) -> RecurrentStep:
    prefill = chunks[num_decode:]
    rows = np.asarray([chunk.request.state_row for chunk in chunks])
    has_state = np.asarray([chunk.start > 0 for chunk in chunks])
    staged_rows, staged_has_state = _to_device([rows, has_state], device)
    packed = None
    if prefill:
        packed = cut_chunks([c.start for c in prefill], [c.length for c in prefill], kernel_chunk, device)
    return RecurrentStep(
        num_decode=num_decode,
        decode_rows=_as_slice(rows[:num_decode]) or staged_rows[:num_decode],
        prefill_rows=staged_rows[num_decode:],
        has_initial_state=staged_has_state[num_decode:].bool(),
        chunks=packed,
        snapshots=_stage_snapshots(prefill, packed, kernel_chunk, device) if with_snapshots else None,
    )


def _as_slice(rows: np.ndarray) -> slice | None:
    """Ascending rows without a gap as a slice; None if there are none, or a gap."""
    if len(rows) == 0 or rows[-1] - rows[0] != len(rows) - 1:
        return None
    return slice(int(rows[0]), int(rows[-1]) + 1)


def snapshots_within(chunk: Chunk) -> list[Snapshot]:
    """Those that the chunk's computation passes."""
    return [one for one in chunk.request.snapshots if chunk.start < one.position <= chunk.end]


def _stage_snapshots(
    prefill: Sequence[Chunk], packed: PackedChunks | None, kernel_chunk: int, device: torch.device
) -> SnapshotPlaces | None:
    """Where in the packed prefill the wanted states arise: block boundaries are ends of kernel chunks (HY-9)."""
    slots, sequences, chunks, tokens = [], [], [], []
    first_chunk = first_token = 0
    for i, chunk in enumerate(prefill):
        for snapshot in snapshots_within(chunk):
            slots.append(snapshot.slot)
            sequences.append(i)
            chunks.append(first_chunk + snapshot.position // kernel_chunk - chunk.start // kernel_chunk - 1)
            tokens.append(first_token + snapshot.position - chunk.start)
        first_chunk += packed.chunk_counts[i]
        first_token += chunk.length
    if not slots:
        return None
    return SnapshotPlaces(*_to_device([np.asarray(part) for part in (slots, sequences, chunks, tokens)], device))


def _choose_logits(chunks: Sequence[Chunk]) -> tuple[list[int], list[int], list[PromptScore]]:
    """Which packed tokens are sampled from, which score prompt tokens, and whose."""
    sample_tokens: list[int] = []
    score_tokens: list[int] = []
    scores: list[PromptScore] = []
    first_token = 0
    for chunk in chunks:
        start, end = _scored_span(chunk)
        if start < end:
            rows = slice(len(score_tokens), len(score_tokens) + end - start)
            scores.append(PromptScore(chunk, rows, chunk.request.prompt_tokens[start + 1 : end + 1]))
            score_tokens += range(first_token + start - chunk.start, first_token + end - chunk.start)
        first_token += chunk.length
        if chunk.yields_token:
            sample_tokens.append(first_token - 1)
    return sample_tokens, score_tokens, scores


def _scored_span(chunk: Chunk) -> tuple[int, int]:
    """Positions [start, end) of the chunk whose logits score a prompt token that has no log-prob yet."""
    request = chunk.request
    if not request.params.wants_prompt_log_probs:
        return 0, 0
    return max(chunk.start, len(request.prompt_log_probs)), min(chunk.end, request.prompt_length - 1)


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> Sequence[Tensor]:
    """Integer arrays as int64 tensors, in one copy."""
    flat = torch.from_numpy(np.concatenate([array.astype(np.int64) for array in arrays]))
    return flat.to(device, non_blocking=True).split([len(array) for array in arrays])
