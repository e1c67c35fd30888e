"""Input batch of a captured step: writes its arrays and builds the model input from the static buffers.

Padding rows are dummy requests: they decode or prefill token 0 at position 0, in the dummy block, and their sampled
tokens are not read. On CUDA kernels skip their states and surplus snapshot entries; elsewhere there are spare slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from megatron_ext.memory.engine_plan import EnginePlan
from megatron_ext.memory.step_states import RowPairs
from megatron_ext.mixers.recurrent import RecurrentStep
from megatron_ext.ops.chunked import ChunkGrid, PaddedPlaces, static_chunks
from megatron_ext.ops.paged_attention import PagedBatch
from megatron_ext.ops.state_slots import SnapshotPlaces, StateSlots
from megatron_ext.ops.varlen import Resumes, starts
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.runner.cuda_graphs.buckets import Bucket
from megatron_ext.runner.input_writer import KEPT, BlockRows, StagingRules, cut_chunk, input_arrays
from megatron_ext.runner.layout import Layout, Shape
from megatron_ext.runner.model_input import ModelInput
from megatron_ext.runner.sampler import sampling_layout, write_sampling_options
from megatron_ext.scheduling.running_slots import RunningSlot
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep

DUMMY_REQUEST: Final = -1
_NO_COPY: Final = (-1, -1)  # see `ops.state_copy`
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class SpareSlots:
    """Slots of padding rows.

    Attributes:
        live: Running state slot, the last one.
        snapshot: Snapshot slot of surplus entries.
        is_skipped: Whether kernels skip padding: the device gets -1 for the running state slot, which plain torch takes
            as the last one, too.
    """

    live: int
    snapshot: int
    is_skipped: bool

    @classmethod
    def of(cls, plan: EnginePlan, device: torch.device) -> SpareSlots:
        """Return the slots in the pools of a plan."""
        return cls(plan.limits.max_requests, plan.padding_slot, device.type == "cuda")


def layout_of(bucket: Bucket, rules: StagingRules) -> Layout:
    """Return the layout of everything that a step of this bucket needs on the device."""
    rows, tokens = bucket.rows, bucket.num_tokens
    shapes: dict[str, Shape] = {
        "input_ids": (tokens,),
        "position_ids": (tokens,),
        "slot_mapping": (tokens,),
        "table_rows": (rows,),
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
    kept: dict[str, Shape] = dict.fromkeys(KEPT, (bucket.snapshots,))
    sequences: dict[str, Shape] = dict.fromkeys(("has_state", "restore_from", "restore_to"), (grid.sequences,))
    places: dict[str, Shape] = dict.fromkeys(("place_tokens", "place_is_padding"), (grid.count * grid.places,))
    per_token: dict[str, Shape] = dict.fromkeys(("seq_idx", "place_of_token"), (grid.tokens,))
    cumulative: dict[str, Shape] = {"cu_seqlens": (grid.sequences + 1,), "cu_chunk_seqlens": (grid.count + 1,)}
    kept["kept_offsets"] = (grid.sequences + 1,)
    return kept | sequences | places | per_token | cumulative


class InputBatch:
    """Writer of a step's inputs into the host's arrays.

    Args:
        rules: Constants of pools and model.
        spare: Slots for padding rows.
        block_rows: Block table rows of this step and of previous ones.
    """

    def __init__(self, rules: StagingRules, spare: SpareSlots, block_rows: BlockRows) -> None:
        self._rules = rules
        self._spare = spare
        self._block_rows = block_rows
        self._dummy = (BlockId(rules.dummy_block),)

    def pad(self, step: ScheduledStep, bucket: Bucket) -> tuple[ScheduledChunk, ...]:
        """Return a chunk for each row: decodes, then prefills, each kind followed by its dummy requests."""
        decodes, prefills = step.chunks[: step.num_decode], step.chunks[step.num_decode :]
        missing = bucket.decodes - len(decodes), bucket.prefills - len(prefills)
        return (
            *decodes,
            *[self._dummy_chunk(is_decode=True)] * missing[0],
            *prefills,
            *[self._dummy_chunk(is_decode=False)] * missing[1],
        )

    def _dummy_chunk(self, *, is_decode: bool) -> ScheduledChunk:
        return ScheduledChunk(DUMMY_REQUEST, (0,), 0, 1, is_decode, self._dummy, 0, RunningSlot(self._spare.live))

    def write(
        self,
        chunks: Sequence[ScheduledChunk],
        bucket: Bucket,
        arrays: Arrays,
        restores: RowPairs = (),
        copies: RowPairs = (),
    ) -> None:
        """Fill every array of the bucket's layout.

        Args:
            chunks: One chunk per row, see `pad`.
            bucket: Bucket of the step.
            arrays: Arrays by the names of `layout_of`.
            restores: Copies of snapshots before the layers; see `StepStates.take`.
            copies: Copies of running states after the layers; at most `bucket.copies` pairs.
        """
        rules, prefills, cuts = self._rules, chunks[bucket.decodes :], []
        if rules.has_states and prefills:
            max_chunks = bucket.grid(rules.kernel_chunk).chunks
            for chunk in prefills:
                pieces = cut_chunk(chunk, rules.kernel_chunk, snapshots_in_prefill=rules.snapshots_in_prefill)
                cuts.append([*pieces, *[0] * (max_chunks - len(pieces))])
        written = input_arrays(chunks, bucket.decodes, cuts, rules, self._block_rows)
        written["table_rows"] = written["slots"]
        written["sample_tokens"] = written["cu_seqlens_q"][1:] - 1
        if rules.has_states and self._spare.is_skipped:
            written["slots"] = np.where(written["slots"] == self._spare.live, -1, written["slots"])
        self._fill(written, bucket, arrays)
        write_sampling_options([chunk.sampling for chunk in chunks], arrays)
        if rules.has_states:
            self._write_pairs(arrays, "copy_from", "copy_to", copies)
            if prefills:
                self._write_pairs(arrays, "restore_from", "restore_to", restores)
                write_grid(np.asarray(cuts), bucket.grid(rules.kernel_chunk), arrays)

    def _fill(self, written: Arrays, bucket: Bucket, arrays: Arrays) -> None:
        """Copy the arrays of a step's chunks and pad them; see `SpareSlots` for surplus snapshot entries."""
        rules, padding = self._rules, dict.fromkeys(written, 0)
        padding["slot_mapping"] = rules.dummy_block * rules.block_size
        if "cu_seqlens" in written:
            spare, last = self._spare, bucket.grid(rules.kernel_chunk).chunks - 1
            padding |= {"kept_slots": spare.snapshot, "kept_chunks": last, "seq_idx": bucket.prefills - 1}
        for name in written.keys() & arrays.keys():
            width = written[name].shape[-1]
            arrays[name][..., :width], arrays[name][..., width:] = written[name], padding[name]

    @staticmethod
    def _write_pairs(arrays: Arrays, sources: str, targets: str, pairs: RowPairs) -> None:
        """Write copies of states, padded with the pair that the operator ignores."""
        missing = len(arrays[sources]) - len(pairs)
        assert missing >= 0, "a bucket has room for its copies"
        numbers = np.asarray([*pairs, *[_NO_COPY] * missing], dtype=np.int64)
        arrays[sources][:], arrays[targets][:] = numbers[:, 0], numbers[:, 1]


def write_grid(cuts: np.ndarray, grid: ChunkGrid, arrays: Arrays) -> None:
    """Write the padded places of each chunk's tokens; `cuts` [S, m] are chunk lengths, zeros after the last chunk."""
    lengths = cuts.reshape(-1, 1)
    firsts, offsets = starts(lengths.ravel()), np.arange(grid.places)
    is_padding = offsets >= lengths
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
    where = parts["block_table"], parts["cu_seqlens_q"], parts["seqlens_k"]
    batch = PagedBatch(bucket.decodes, lengths, (keys,) * bucket.rows, rules.block_size, *where, has_static_shapes=True)
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
        PaddedPlaces(parts["place_tokens"], parts["place_is_padding"].bool(), parts["place_of_token"]),
        Resumes(rules.block_size, parts["seqlens_k"][bucket.decodes :]),
    )
    kept = SnapshotPlaces(*(parts[name] for name in KEPT))
    snapshots = kept if rules.snapshots_in_prefill else None
    slots = StateSlots(parts["slots"][bucket.decodes :], parts["has_state"].bool(), snapshots)
    return RecurrentStep(bucket.decodes, decode_slots, chunks, slots)
