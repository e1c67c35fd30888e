"""Operators with lengths known only on the device give the results of lengths known on the host (CU-4)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megatron_ext.mixers.recurrent import cut_between
from megatron_ext.ops import chunked as in_grids  # the function itself would lose what it provides, see conftest
from megatron_ext.ops.paged_attention import PAGED_ATTENTION, PagedBatch, build_paged_batch, paged_attention
from megatron_ext.ops.state_slots import PrefillStates, StateSlots
from megatron_ext.ops.varlen import pack_chunks, starts
from megatron_ext.runner.cuda_graphs.input_batch import write_grid
from tests.on_request import long_except
from tests.unit_tests.ops.backends import usable
from tests.unit_tests.ops.state_cases import operator
from tests.unit_tests.ops.test_paged_attention import BLOCK, SCALE, Step
from tests.unit_tests.support.chunk_grid import snapshot_places

# Two sequences and a token of padding, with room for three of 150 tokens in chunks of 64.
STARTS, LENGTHS, STOPS = [7, 0, 0], [100, 3, 1], [[64], [], []]
GRID = in_grids.ChunkGrid(sequences=3, chunks=3, places=64, tokens=150)


def assert_close(found, expected) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def padded_chunks():
    """Chunks that a captured step describes for these sequences."""
    cuts = np.zeros((GRID.sequences, GRID.chunks), dtype=np.int64)
    for row, *prefill in zip(cuts, STARTS, LENGTHS, STOPS, strict=True):
        start, length, stops = prefill
        pieces = cut_between(start, length, GRID.places, stops)
        row[: len(pieces)] = pieces
    sizes = {"place_of_token": GRID.tokens}
    sizes |= dict.fromkeys(("place_tokens", "place_is_padding"), GRID.count * GRID.places)
    arrays = {name: np.full(size, 77, dtype=np.int64) for name, size in sizes.items()}
    write_grid(cuts, GRID, arrays)
    staged = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return in_grids.static_chunks(
        GRID,
        torch.tensor([0, 100, 103, 104]),
        torch.tensor([0] * 100 + [1] * 3 + [2] * 47),
        torch.from_numpy(starts(cuts.ravel())),
        in_grids.PaddedPlaces(staged["place_tokens"], staged["place_is_padding"].bool(), staged["place_of_token"]),
    )


def exact_chunks():
    """Cut the same sequences into chunks without padding."""
    return pack_chunks([cut_between(*one[:2], 64, one[2]) for one in zip(STARTS, LENGTHS, STOPS, strict=True)], None)


PLACES = list(itertools.product([None, 20], [None, 32, 3]))


@pytest.mark.parametrize("name", ["ssd", "selective_scan", "gated_delta_rule", "plain_conv1d"])
def test_prefills_in_a_grid_of_chunks(name):
    """CU-4: outputs, last states and a snapshot inside; empty chunks pass states on, and other tokens may be NaN."""
    case = operator(name, 4)
    tokens = [one[:150].clone() for one in case.tokens]
    for one in tokens:
        one[104:] = torch.nan  # after the last sequence
    live = torch.randn(4, *case.state, generator=torch.Generator().manual_seed(1))
    found = []
    for chunks in (padded_chunks(), exact_chunks()):
        piece = 0 if len(chunks.chunk_lengths) == GRID.count else int(np.cumsum(chunks.chunk_lengths).searchsorted(57))
        kept = snapshot_places([(0, 57, 1, piece)], 3)
        slots = StateSlots(torch.tensor([2, 0, 3]), torch.tensor([True, False, False]), kept)
        pool, snapshots = live.clone(), torch.full((2, *case.state), torch.nan)
        with case.run.backends.forced("reference"):
            states = PrefillStates(chunks, slots, pool, snapshots)
            y = case.run.prefill(*case.order(*tokens), states=states, **case.options)
        found.append((y, pool, snapshots))
    (y, pool, snapshots), (other_y, other_pool, other_snapshots) = found
    assert_close(y[:104], other_y[:104])
    assert_close(pool, other_pool)
    assert_close(snapshots[1], other_snapshots[1])
    assert snapshots[0].isnan().all()


@pytest.mark.parametrize(("window", "gap"), long_except([(None, None), (20, 3)], PLACES))
@pytest.mark.parametrize("backend", usable(PAGED_ATTENTION))
def test_attention_by_lengths_on_the_device(backend, window, gap):
    """CU-4: decodes and prefills, tables wider than need be, tokens after the last sequence, blocks that lie apart."""
    step = Step([(1, 40), (1, 17), (1, 1), (9, 33), (20, 20), (1, 5)], decode_rows=3)
    queries, keys = zip(*step.rows, strict=True)
    plain = build_paged_batch(step.tables, queries, keys, 3, BLOCK, "cpu")
    padding = plain.block_table.new_full((6, 5 - plain.block_table.shape[1]), len(step.key_cache) - 1)
    bounded = PagedBatch(
        num_decode=3,
        query_lengths=(1, 1, 1, 40, 40, 40),
        kv_lengths=(80,) * 6,
        block_size=BLOCK,
        block_table=torch.cat([plain.block_table, padding], dim=1),
        cu_seqlens_q=plain.cu_seqlens_q,
        seqlens_k=plain.seqlens_k,
        has_static_shapes=True,
    )
    q = torch.cat([step.q, torch.full((10, 4, step.head_size), torch.nan)])
    spread = step if gap is None else step.between(gap)
    with PAGED_ATTENTION.forced(backend):
        found, expected = (
            paged_attention(q, one.key_cache, one.value_cache, batch, scale=SCALE, window=window)
            for one, batch in ((spread, bounded), (step, plain))
        )
    assert_close(found[:33], expected[:33])
    assert not found[33:].any()
