"""Block tables and lengths of the sequences of a step, shared by all attention layers, and gathers from blocks.

Letters: T tokens, R sequences (requests in the step), B tokens in a block, W blocks of the longest table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.ops.varlen import StepMetadata, stage_arrays, starts


@dataclass(frozen=True)
class PagedBatch(StepMetadata):
    """Sequences of one step; the first `num_decode` have one query each.

    A sequence's queries are the last of its keys. Lengths are known on the host and on the device, so that no backend
    has to read anything back.

    Attributes:
        num_decode: Sequences that decode.
        query_lengths: Queries of each sequence on the packed token axis, on the host; the axis may have rows after
            them.
        kv_lengths: Keys of each sequence, the queries' own included, on the host.
        block_size: B, tokens.
        block_table: [R, W] int32, blocks of each sequence in order; entries after its keys are never used.
        cu_seqlens_q: [R+1] int64, first query of each sequence, then the number of queries.
        seqlens_k: [R] int64, number of keys of each sequence.
        has_static_shapes: Whether lengths on the host are upper bounds; those on the device are exact in any case.
    """

    num_decode: int
    query_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    block_size: int
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    has_static_shapes: bool = False

    @property
    def num_tokens(self) -> int:
        """Queries of all sequences together."""
        return sum(self.query_lengths)


def build_paged_batch(
    block_tables: Sequence[Sequence[int]],
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    num_decode: int,
    block_size: int,
    device: torch.device | str | None,
) -> PagedBatch:
    """Build the batch of a step's sequences.

    Args:
        block_tables: Blocks of each sequence in order; may hold more than its keys need.
        query_lengths: Queries of each sequence; 1 for the first `num_decode`.
        kv_lengths: Keys of each sequence, the queries' own included.
        num_decode: Sequences that decode, attended in one batch.
        block_size: B, tokens.
        device: Device of the tensors.
    """
    assert all(length == 1 for length in query_lengths[:num_decode])
    counts = [-(-keys // block_size) for keys in kv_lengths]
    table = np.zeros((len(counts), max(counts, default=0)), dtype=np.int32)
    for row, blocks, queries, keys, count in zip(table, block_tables, query_lengths, kv_lengths, counts, strict=True):
        assert 1 <= queries <= keys <= len(blocks) * block_size
        row[:count] = blocks[:count]
    arrays = {"block_table": table, "cu_seqlens_q": starts(query_lengths), "seqlens_k": np.asarray(kv_lengths)}
    staged = stage_arrays(arrays, device)
    where = staged["block_table"], staged["cu_seqlens_q"], staged["seqlens_k"]
    return PagedBatch(num_decode, tuple(query_lengths), tuple(kv_lengths), block_size, *where)


def gather_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the keys or values at places of a pool, [..., Hkv, D].

    Args:
        cache: [NB, B, Hkv, D]; blocks may lie any distance apart, the tokens of a block are evenly spaced.
        slots: [...] int64, block * B + offset.
    """
    (blocks, size), (block_stride, token_stride, *inner) = cache.shape[:2], cache.stride()
    unit = math.gcd(block_stride, token_stride)  # every token begins at a multiple of it
    count = ((blocks - 1) * block_stride + (size - 1) * token_stride) // unit + 1
    between = block_stride - size * token_stride
    rows = slots.flatten()
    if between or unit != token_stride:
        rows = rows * (token_stride // unit) + rows // size * (between // unit)
    flat = cache.as_strided((count, *cache.shape[2:]), (unit, *inner))
    return flat.index_select(0, rows).unflatten(0, slots.shape)
