"""Attention in a window against the formula, one query at a time; pools hold NaN wherever nothing was written."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from megatron_ext.ops.paged_attention import PagedBatch, build_paged_batch, paged_attention, reference

HEADS, KEY_HEADS, SIZE, BLOCK = 4, 2, 8, 4
# Decodes first: (queries, keys) of each sequence.
MIXES = {
    "decodes": [(1, 1), (1, 7), (1, 8), (1, 30), (1, 19)],
    "whole prompts": [(5, 5), (30, 30)],
    "chunks": [(5, 30), (1, 12), (9, 20), (4, 9)],
    "both": [(1, 30), (1, 3), (7, 29), (20, 20), (1, 30)],
}
DECODES = {"decodes": 5, "whole prompts": 0, "chunks": 0, "both": 2}


def pool(mix: str) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """Queries, keys and values, each sequence in its own blocks, in random order, with one row after them."""
    generator, source = torch.Generator().manual_seed(3), random.Random(3)
    lengths = MIXES[mix]
    order = source.sample(range(60), 60)
    tables = [[order.pop() for _ in range(-(-keys // BLOCK))] for _, keys in lengths]
    key_cache, value_cache = (torch.full((60, BLOCK, KEY_HEADS, SIZE), math.nan) for _ in range(2))
    for (_, keys), table in zip(lengths, tables, strict=True):
        for cache in (key_cache, value_cache):
            written = torch.randn(keys, KEY_HEADS, SIZE, generator=generator)
            for position in range(keys):
                cache[table[position // BLOCK], position % BLOCK] = written[position]
    batch = build_paged_batch(tables, [q for q, _ in lengths], [k for _, k in lengths], DECODES[mix], BLOCK, None)
    q = torch.randn(batch.num_tokens + 1, HEADS, SIZE, generator=generator)
    return q, key_cache, value_cache, batch


def expected(q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, window: int) -> Tensor:
    """Softmax over the keys that a query sees, in fp64."""
    rows = []
    for row, (queries, keys) in enumerate(zip(batch.query_lengths, batch.kv_lengths, strict=True)):
        places = [(batch.block_table[row, at // BLOCK], at % BLOCK) for at in range(keys)]
        for position in range(keys - queries, keys):
            seen = places[max(0, position - window + 1) : position + 1]
            k, v = (torch.stack([cache[place] for place in seen]).double() for cache in (key_cache, value_cache))
            k, v = (one.repeat_interleave(HEADS // KEY_HEADS, dim=1) for one in (k, v))  # [seen, Hq, D]
            scores = torch.einsum("hd,khd->hk", q[len(rows)].double(), k) * 0.3
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
    return torch.stack([*rows, torch.zeros(HEADS, SIZE, dtype=torch.float64)]).float()


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 17, 29])
@pytest.mark.parametrize("mix", MIXES)
def test_the_last_keys_of_each_query(mix: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FA-4: memory after a sequence's keys and unused blocks have no effect; computed in tiles of a few queries."""
    monkeypatch.setattr(reference, "_SMALLEST_TILE", 6)
    found = paged_attention(*pool(mix), scale=0.3, window=window)
    torch.testing.assert_close(found, expected(*pool(mix), window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mix", MIXES)
def test_a_window_that_is_long_enough_changes_nothing(mix: str) -> None:
    """Bit for bit: the preferred backend computes, as without one."""
    q, *caches, batch = pool(mix)
    whole = paged_attention(q, *caches, batch, scale=0.3)
    for window in (30, 1000):
        assert torch.equal(paged_attention(q, *caches, batch, scale=0.3, window=window), whole)
    torch.testing.assert_close(whole, reference.paged_attention(q, *caches, batch, scale=0.3), atol=1e-5, rtol=1e-5)


def test_a_few_tokens_are_one_tile() -> None:
    for mix in MIXES:
        found = paged_attention(*pool(mix), scale=0.3, window=5)
        torch.testing.assert_close(found, expected(*pool(mix), 5), atol=1e-5, rtol=1e-5)


def test_the_comparison_sees_one_key_more() -> None:
    """Negative control."""
    for mix in MIXES:
        wrong = paged_attention(*pool(mix), scale=0.3, window=6)
        assert (wrong - expected(*pool(mix), 5)).abs().max() > 1e-2


def test_layers_of_a_step_share_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gather plan is computed once for each window."""
    q, keys, values, batch = pool("both")
    made, band = [], reference._band
    monkeypatch.setattr(reference, "_band", lambda *args: made.append(args[2]) or band(*args))
    for window in (5, 5, 7):
        reference.paged_attention(q, keys, values, batch, scale=0.3, window=window)
    assert made == [5] * 3 + [7] * 3, "one for each sequence that is no decode"
