"""HY-9: chunks of the reference scans, against a count by hand."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.ops.chunked import cut_into_pieces, pad_chunks
from megatron_ext.ops.varlen import PackedChunks, pack_chunks

CUTS = [
    [[1]],
    [[4, 4, 4]],
    [[4, 4, 1]],
    [[2, 4, 3]],
    [[4], [4], [4]],
    [[1], [4, 4, 2], [3, 1]],
    [[2, 2], [1, 1, 1, 1], [3], [1, 1, 1, 1], [5, 5]],
]


@pytest.mark.parametrize("cuts", CUTS)
def test_each_place_names_a_token_of_its_chunk_and_each_token_has_one_place(cuts: list[list[int]]) -> None:
    chunks = pack_chunks(cuts, "cpu")
    padded = chunks.prepared(pad_chunks)
    lengths = [length for cut in cuts for length in cut]
    if padded.places is None:
        assert len(set(lengths)) == 1
        return
    token_rows = torch.arange(sum(lengths)).split(lengths)
    places = padded.places.tokens.view(len(lengths), padded.longest)
    for row, tokens, padding in zip(places.tolist(), token_rows, padded.places.is_padding.tolist(), strict=True):
        behind = padded.longest - len(tokens)
        assert row == tokens.tolist() + [tokens[-1].item()] * behind
        assert padding == [False] * len(tokens) + [True] * behind
    assert places.view(-1)[padded.places.place_of_token].tolist() == list(range(sum(lengths)))


@pytest.mark.parametrize("cuts", CUTS)
def test_states_travel_along_ranks(cuts: list[list[int]]) -> None:
    """Each chunk's state comes from the chunk before it in its sequence, the first one's from its initial state."""
    chunks = pack_chunks(cuts, "cpu")
    padded = chunks.prepared(pad_chunks)
    if padded.ranks is None:
        assert len({len(cut) for cut in cuts}) == 1
        return
    before = [("initial", i) if rank == 0 else (i, rank - 1) for i, cut in enumerate(cuts) for rank in range(len(cut))]
    after = [(i, rank) for i, cut in enumerate(cuts) for rank in range(len(cut))]
    assert _carried(chunks, "before") == before
    assert _carried(chunks, "after") == after


def _carried(chunks: PackedChunks, which: str) -> list[tuple]:
    """The names of the states that `ranks.before` or `ranks.after` point at, walking the ranks as an operator does."""
    names = [(i, rank) for i, count in enumerate(chunks.chunk_counts) for rank in range(count)]
    stack = [[("initial", i) for i in chunks.prepared(pad_chunks).ranks.sequences.tolist()]]
    for row in chunks.prepared(pad_chunks).ranks.chunks.split(chunks.prepared(pad_chunks).ranks.sizes):
        stack.append([names[chunk] for chunk in row.tolist()])
        owners = [name[1] if name[0] == "initial" else name[0] for name in stack[-2][: len(row)]]
        assert owners == [name[0] for name in stack[-1]], "a state went to another sequence"
    flat = [name for row in stack for name in row]
    return [flat[place] for place in getattr(chunks.prepared(pad_chunks).ranks, which).tolist()]


def test_index_tensors_share_one_buffer() -> None:
    """Index tensors need one host-to-device copy: every int64 tensor is a view of one storage."""
    padded = pack_chunks([[2, 4], [3]], "cpu").prepared(pad_chunks)
    staged = [padded.places.tokens, padded.places.place_of_token, padded.ranks.before, padded.ranks.sequences]
    assert len({tensor.untyped_storage().data_ptr() for tensor in staged}) == 1


def test_pieces_end_where_chunks_end() -> None:
    """Chunks of 40 and 5 tokens, and of 64 and 1, cut into pieces of at most 32; cut once, however often asked for."""
    chunks = pack_chunks([[40, 5], [64, 1]], "cpu")
    pieces = chunks.prepared(cut_into_pieces)
    assert pieces.packed.chunk_lengths == (32, 8, 5, 32, 32, 1)
    assert pieces.packed.chunk_counts == (3, 3)
    assert pieces.packed.sequences.lengths == chunks.sequences.lengths
    assert pieces.last.tolist() == [1, 2, 4, 5]
    assert chunks.prepared(cut_into_pieces) is pieces
