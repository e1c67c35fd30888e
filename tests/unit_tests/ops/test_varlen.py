"""HY-9: the host describes packed sequences and chunks; every index tensor against a count by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_ext.ops.varlen import pack_chunks, stage_arrays


def test_pack_chunks_literal() -> None:
    chunks = pack_chunks([[2, 4], [3]], "cpu")
    assert chunks.sequences.lengths == (6, 3)
    assert chunks.chunk_lengths == (2, 4, 3)
    assert chunks.chunk_counts == (2, 1)
    assert chunks.cu_chunk_seqlens.tolist() == [0, 2, 6, 9]
    assert chunks.chunk_seq_idx.tolist() == [0, 0, 1]
    assert chunks.last_chunk_indices.tolist() == [1, 2]


def test_index_tensors_share_one_buffer() -> None:
    """Index tensors need one host-to-device copy a step: every int64 tensor is a view of one storage."""
    chunks = pack_chunks([[2, 4], [3]], "cpu")
    staged = [chunks.sequences.cu_seqlens, chunks.sequences.seq_idx, chunks.cu_chunk_seqlens, chunks.chunk_seq_idx]
    staged += [chunks.last_chunk_indices]
    assert len({tensor.untyped_storage().data_ptr() for tensor in staged}) == 1


@pytest.mark.parametrize("size", [0, 1, 4, 5])
def test_arrays_of_int32_share_the_buffer(size: int) -> None:
    """CU-24: two elements in a number; the arrays around them keep their values, types and shapes."""
    table = np.arange(2 * size, dtype=np.int32).reshape(2, size)[:1]
    given = {"before": np.arange(3), "table": table, "flags": np.asarray([True, False]), "after": np.asarray([2**40])}
    staged = stage_arrays(given, "cpu")
    assert {name: one.dtype for name, one in staged.items()} == dict.fromkeys(given, torch.int64) | {
        "table": torch.int32
    }
    assert {name: one.tolist() for name, one in staged.items()} == {name: one.tolist() for name, one in given.items()}
    assert len({one.untyped_storage().data_ptr() for one in staged.values()}) == 1


@pytest.mark.parametrize("pieces", [[], [[]], [[0]], [[3], [0]]])
def test_empty_sequences_are_refused(pieces: list[list[int]]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        pack_chunks(pieces, "cpu")
