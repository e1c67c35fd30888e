"""Where the keys of each row of a step lie in the pool of blocks: built once per step, used by every layer.

Letters: T tokens, R rows (requests in the step), B tokens in a block, K keys of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PrefillRow:
    """A row with any number of queries: the last `query_length` of its `kv_length` positions.

    Attributes:
        query_start: First of its queries on the token axis.
        query_length: Its queries, at least 1.
        kv_length: Its keys, at least query_length.
        blocks: [ceil(kv_length / B)] int64, its blocks in order.
        mask: [query_length, kv_length] bool, True where a query sees a key; None if plain causal (equal lengths) or if
            its only query sees every key.
    """

    query_start: int
    query_length: int
    kv_length: int
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class PagedLayout:
    """Rows of one step; the first `num_decode_rows` have one query each, the others follow in `prefill_rows`.

    Attributes:
        num_tokens: Queries of all rows; the token axis may go on behind them.
        num_decode_rows: Rows that are attended in one batch.
        decode_places: [num_decode_rows, K] int64, the keys' places in the pool (block * B + offset), K being the
            longest row's; shorter rows repeat their own first place, which is always written.
        decode_mask: [num_decode_rows, 1, 1, K] bool, True at real keys; None if all rows are equally long.
        prefill_rows: The other rows.
    """

    num_tokens: int
    num_decode_rows: int
    decode_places: Tensor
    decode_mask: Tensor | None
    prefill_rows: tuple[PrefillRow, ...]


def build_paged_layout(
    block_tables: Sequence[Sequence[int]],
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    num_decode_rows: int,
    block_size: int,
    device: torch.device | str | None,
) -> PagedLayout:
    """Describe the rows of a step.

    Args:
        block_tables: Blocks of each row in order; may hold more than its keys need.
        query_lengths: Queries of each row on the packed token axis; 1 for the first num_decode_rows.
        kv_lengths: Keys of each row, the queries' own included.
        num_decode_rows: Rows to attend in one batch.
        block_size: B, tokens.
        device: Where the index tensors go.
    """
    tables = _needed_blocks(block_tables, query_lengths, kv_lengths, block_size)
    decode, prefill = slice(num_decode_rows), slice(num_decode_rows, None)
    assert all(length == 1 for length in query_lengths[decode])
    places = _decode_places(tables[decode], kv_lengths[decode], block_size)
    staged = torch.from_numpy(np.concatenate([places.reshape(-1), *tables[prefill]])).to(device)
    blocks = staged[places.size :].split([len(table) for table in tables[prefill]])
    return PagedLayout(
        num_tokens=sum(query_lengths),
        num_decode_rows=num_decode_rows,
        decode_places=staged[: places.size].view(places.shape),
        decode_mask=_decode_mask(kv_lengths[decode], device),
        prefill_rows=_prefill_rows(blocks, query_lengths[prefill], kv_lengths[prefill], num_decode_rows),
    )


def _needed_blocks(
    block_tables: Sequence[Sequence[int]], query_lengths: Sequence[int], kv_lengths: Sequence[int], block_size: int
) -> list[np.ndarray]:
    """The blocks that hold each row's keys."""
    tables = []
    for table, queries, keys in zip(block_tables, query_lengths, kv_lengths, strict=True):
        assert 1 <= queries <= keys <= len(table) * block_size
        tables.append(np.asarray(table[: -(-keys // block_size)], dtype=np.int64))
    return tables


def _decode_places(tables: Sequence[np.ndarray], kv_lengths: Sequence[int], block_size: int) -> np.ndarray:
    """Places in the pool of every key of every decode row: [rows, longest], see PagedLayout.decode_places."""
    places = np.zeros((len(tables), max(kv_lengths, default=0)), dtype=np.int64)
    for row, table, keys in zip(places, tables, kv_lengths, strict=True):
        own = (table[:, None] * block_size + np.arange(block_size)).reshape(-1)[:keys]
        row[:] = own[0]
        row[:keys] = own
    return places


def _decode_mask(kv_lengths: Sequence[int], device: torch.device | str | None) -> Tensor | None:
    if not kv_lengths or min(kv_lengths) == max(kv_lengths):
        return None
    is_real = np.arange(max(kv_lengths)) < np.asarray(kv_lengths)[:, None]
    return torch.from_numpy(is_real).to(device)[:, None, None]


def _prefill_rows(
    blocks: Sequence[Tensor], query_lengths: Sequence[int], kv_lengths: Sequence[int], first_query: int
) -> tuple[PrefillRow, ...]:
    rows = []
    for row_blocks, queries, keys in zip(blocks, query_lengths, kv_lengths, strict=True):
        mask = None if queries in (1, keys) else _bottom_right_mask(queries, keys, row_blocks.device)
        rows.append(PrefillRow(first_query, queries, keys, row_blocks, mask))
        first_query += queries
    return tuple(rows)


def _bottom_right_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where query i, at position keys - queries + i, sees key j: [queries, keys]."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
