"""Input batch of a captured step: writes its arrays and builds the model input from the static buffers.

Padding rows are dummy requests: they decode or prefill token 0 at position 0, in the dummy block and the spare state
slot, and their sampled tokens are not read. Surplus snapshot entries write to a spare snapshot slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.ops.paged_attention import StaticBatch
from megatron_ext.ops.state_slots import SnapshotPlaces, StateSlots
from megatron_ext.ops.static_chunks import ChunkGrid, static_chunks
from megatron_ext.ops.varlen import Resumes, starts
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.runner.block_rows import BlockRows
from megatron_ext.runner.cuda_graphs.buckets import Bucket, Buckets
from megatron_ext.runner.layout import Layout, Shape
from megatron_ext.runner.model_input import ModelInput, StagingRules, stage_tokens
from megatron_ext.runner.sampler import sampling_layout, write_sampling_options
from megatron_ext.scheduling.running_slots import RunningSlot
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep

NOBODY: Final = -1
_NO_COPY: Final = (-1, -1)  # see `ops.state_copy`
Arrays = Mapping[str, np.ndarray]
Copies = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class SpareSlots:
    """Spare slots that only padding rows use."""

    live: int
    snapshot: int


def layout_of(bucket: Bucket, rules: StagingRules) -> Layout:
    """Return the layout of everything that a step of this bucket needs on the device."""
    rows, tokens = bucket.rows, bucket.num_tokens
    shapes: dict[str, Shape] = {
        "input_ids": (tokens,),
        "position_ids": (tokens,),
        "slot_mapping": (tokens,),
        "block_table": (rows, bucket.blocks),
        "cu_seqlens_q": (rows + 1,),
        "seqlens_k": (rows,),
        "token_places": (bucket.decodes,),
        "sample_tokens": (rows,),
    }
    if rules.has_states:
        shapes |= {"slots": (rows,), "copy_from": (bucket.copies,), "copy_to": (bucket.copies,)}
        if bucket.prefills:
            shapes |= _prefill_shapes(bucket, bucket.grid(rules.kernel_chunk))
    return Layout(shapes, frozenset()) | sampling_layout(rows)


def _prefill_shapes(bucket: Bucket, grid: ChunkGrid) -> dict[str, Shape]:
    kept = dict.fromkeys(("kept_slots", "kept_sequences", "kept_chunks", "kept_tokens"), (bucket.snapshots,))
    sequences: dict[str, Shape] = dict.fromkeys(("has_state", "restore_from", "restore_to"), (grid.sequences,))
    places: dict[str, Shape] = dict.fromkeys(("place_tokens", "place_is_padding"), (grid.count * grid.places,))
    per_token: dict[str, Shape] = dict.fromkeys(("seq_idx", "place_of_token"), (grid.tokens,))
    cumulative: dict[str, Shape] = {"cu_seqlens": (grid.sequences + 1,), "cu_chunk_seqlens": (grid.count + 1,)}
    return kept | sequences | places | per_token | cumulative


class InputBatch:
    """Writer of a step's inputs into the host's arrays.

    Args:
        rules: Constants of pools and model.
        buckets: Sizes that steps are padded to.
        spare: Slots for padding rows.
    """

    def __init__(self, rules: StagingRules, buckets: Buckets, spare: SpareSlots) -> None:
        self._rules = rules
        self._buckets = buckets
        self._spare = spare
        self._block_rows = BlockRows()
        self._dummy = (BlockId(rules.dummy_block),)

    def pad(self, step: ScheduledStep, bucket: Bucket) -> tuple[ScheduledChunk, ...]:
        """Return a chunk for each row: decodes, then prefills, each kind followed by its dummy requests."""
        decodes, prefills = step.chunks[: step.num_decode], step.chunks[step.num_decode :]
        missing = bucket.decodes - len(decodes), bucket.prefills - len(prefills)
        return (
            *decodes,
            *[self._nobody(is_decode=True)] * missing[0],
            *prefills,
            *[self._nobody(is_decode=False)] * missing[1],
        )

    def _nobody(self, *, is_decode: bool) -> ScheduledChunk:
        return ScheduledChunk(NOBODY, (0,), 0, 1, is_decode, self._dummy, 0, RunningSlot(self._spare.live))

    def write(self, chunks: Sequence[ScheduledChunk], bucket: Bucket, arrays: Arrays, copies: Copies) -> None:
        """Fill every array of the bucket's layout.

        Args:
            chunks: One chunk per row, see `pad`.
            bucket: Bucket of the step.
            arrays: Arrays by the names of `layout_of`.
            copies: Running states that become snapshots after the forward, as (running state slot, snapshot slot); at
                most `bucket.copies` pairs.
        """
        rules, slots = self._rules, [chunk.running_slot for chunk in chunks]
        tables = [chunk.block_ids for chunk in chunks]
        table = self._block_rows.of(slots, tables)
        begins, ends = [chunk.start for chunk in chunks], [chunk.end for chunk in chunks]
        firsts = starts([chunk.length for chunk in chunks])
        total = int(firsts[-1])
        staged = stage_tokens(chunks, table, begins, firsts, rules)
        nothing = {"input_ids": 0, "position_ids": 0, "slot_mapping": rules.dummy_block * rules.block_size}
        for name, padding in nothing.items():
            arrays[name][:total] = staged[name][:total]
            arrays[name][total:] = padding
        used = np.asarray([len(one) for one in tables])[:, None] > np.arange(table.shape[1])
        arrays["block_table"][:, : table.shape[1]] = np.where(used, table, rules.dummy_block)
        arrays["block_table"][:, table.shape[1] :] = rules.dummy_block
        arrays["cu_seqlens_q"][:] = firsts
        arrays["seqlens_k"][:] = ends
        arrays["sample_tokens"][:] = firsts[1:] - 1
        write_sampling_options([chunk.sampling for chunk in chunks], arrays)
        if rules.has_states:
            arrays["slots"][:] = slots
            self._write_pairs(arrays, "copy_from", "copy_to", copies)
            if bucket.prefills:
                self._write_prefills(chunks[bucket.decodes :], bucket, arrays)

    @staticmethod
    def _write_pairs(arrays: Arrays, sources: str, targets: str, pairs: Copies) -> None:
        """Write copies of states, padded with the pair that the operator ignores."""
        missing = len(arrays[sources]) - len(pairs)
        assert missing >= 0, "a bucket has room for its copies"
        numbers = np.asarray([*pairs, *[_NO_COPY] * missing], dtype=np.int64)
        arrays[sources][:], arrays[targets][:] = numbers[:, 0], numbers[:, 1]

    def _write_prefills(self, prefills: Sequence[ScheduledChunk], bucket: Bucket, arrays: Arrays) -> None:
        grid = bucket.grid(self._rules.kernel_chunk)
        restores = [(one.restore.slot, one.running_slot) for one in prefills if one.restore is not None]
        self._write_pairs(arrays, "restore_from", "restore_to", restores)
        lengths = [one.length for one in prefills]
        total = sum(lengths)
        arrays["has_state"][:] = [one.start > 0 for one in prefills]
        arrays["cu_seqlens"][:] = starts(lengths)
        arrays["seq_idx"][:total] = np.repeat(np.arange(len(prefills)), lengths)
        arrays["seq_idx"][total:] = len(prefills) - 1
        cuts = np.zeros((grid.sequences, grid.chunks), dtype=np.int64)
        for row, chunk in zip(cuts, prefills, strict=True):
            pieces = self._buckets.cut(chunk, grid)
            row[: len(pieces)] = pieces
        write_grid(cuts, grid, arrays)
        self._write_kept(prefills, cuts, grid, arrays)

    def _write_kept(
        self, prefills: Sequence[ScheduledChunk], cuts: np.ndarray, grid: ChunkGrid, arrays: Arrays
    ) -> None:
        """Write the states to keep inside prefills, each a chunk's end; spare entries keep sequence 0's last chunk."""
        firsts, ends = arrays["cu_seqlens"], cuts.cumsum(1)
        kept: list[tuple[int, int, int, int]] = []
        if self._rules.snapshots_in_prefill:
            for i, chunk in enumerate(prefills):
                for one in chunk.snapshots:
                    length = one.position - chunk.start
                    piece = i * grid.chunks + int(np.searchsorted(ends[i], length))
                    kept.append((one.slot, i, piece, int(firsts[i]) + length))
        kept += [(self._spare.snapshot, 0, grid.chunks - 1, int(firsts[1]))] * (len(arrays["kept_slots"]) - len(kept))
        names = ("kept_slots", "kept_sequences", "kept_chunks", "kept_tokens")
        for name, numbers in zip(names, zip(*kept, strict=True), strict=True):
            arrays[name][:] = numbers


def write_grid(cuts: np.ndarray, grid: ChunkGrid, arrays: Arrays) -> None:
    """Write the padded places of each chunk's tokens; `cuts` [S, m] are chunk lengths, zeros after the last chunk."""
    lengths = cuts.reshape(-1, 1)
    firsts, offsets = starts(lengths.ravel()), np.arange(grid.places)
    is_padding = offsets >= lengths
    arrays["cu_chunk_seqlens"][:] = firsts
    arrays["place_tokens"][:] = (firsts[:-1, None] + np.minimum(offsets, lengths - 1)).reshape(-1)
    arrays["place_is_padding"][:] = is_padding.reshape(-1)
    found = np.flatnonzero(~is_padding)
    arrays["place_of_token"][: len(found)] = found
    arrays["place_of_token"][len(found) :] = 0


def model_input(
    chunks: tuple[ScheduledChunk, ...], bucket: Bucket, parts: Mapping[str, Tensor], rules: StagingRules
) -> ModelInput:
    """Return the model input of a bucket: views of the static buffers, and bounds that the bucket alone determines.

    The input is made anew for each run because backends prepare data from the contents of the buffers.
    """
    keys = bucket.blocks * rules.block_size
    lengths = (1,) * bucket.decodes + (bucket.tokens,) * bucket.prefills
    where = {name: parts[name] for name in ("block_table", "cu_seqlens_q", "seqlens_k")}
    batch = StaticBatch(bucket.decodes, lengths, (keys,) * bucket.rows, rules.block_size, **where)
    return ModelInput(
        chunks=chunks,
        num_decode=bucket.decodes,
        num_tokens=bucket.num_tokens,
        input_ids=parts["input_ids"],
        position_ids=parts["position_ids"],
        slot_mapping=parts["slot_mapping"],
        paged_batch=batch,
        recurrent=_recurrent(bucket, parts, rules) if rules.has_states else None,
        sample_tokens=parts["sample_tokens"],
        sampling=(),
        score_tokens=parts["sample_tokens"][:0],
        prompt_scores=(),
    )


def _recurrent(bucket: Bucket, parts: Mapping[str, Tensor], rules: StagingRules) -> RecurrentStep:
    decode_slots = parts["slots"][: bucket.decodes]
    if not bucket.prefills:
        return RecurrentStep(bucket.decodes, decode_slots, None, None)
    chunks = static_chunks(
        bucket.grid(rules.kernel_chunk),
        parts["cu_seqlens"],
        parts["seq_idx"],
        parts["cu_chunk_seqlens"],
        parts["place_tokens"],
        parts["place_is_padding"].bool(),
        parts["place_of_token"],
        Resumes(rules.block_size, parts["seqlens_k"][bucket.decodes :]),
    )
    kept = SnapshotPlaces(parts["kept_slots"], parts["kept_sequences"], parts["kept_chunks"], parts["kept_tokens"])
    snapshots = kept if rules.snapshots_in_prefill else None
    slots = StateSlots(parts["slots"][bucket.decodes :], parts["has_state"].bool(), snapshots)
    return RecurrentStep(bucket.decodes, decode_slots, chunks, slots)
