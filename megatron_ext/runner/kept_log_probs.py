"""Reads and writes of the log-probs that are kept with blocks, in an eager step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.memory.pools import LogProbPool
from megatron_ext.ops.varlen import to_device
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.scheduling.step import ScheduledChunk

KEPT_PLACES: Final = ("log_prob_places", "resumed_states", "block_end_states")


class KeptPlaces(NamedTuple):
    """Places of a step's k scored tokens, and of hidden states, in a pool of log-probs."""

    log_probs: Tensor  # [k] int64, index into the log-probs flattened over blocks and places; any for those not kept
    resumed: Tensor  # [2, n] int64, rows of the scored tokens whose hidden states are kept, and their blocks
    block_ends: Tensor  # [2, m] int64, packed tokens that end blocks, and these blocks


def kept_places(
    prefill: Sequence[ScheduledChunk], firsts: Sequence[int] | np.ndarray, block_size: int
) -> dict[str, np.ndarray]:
    """Return the arrays of `KeptPlaces` of a step's prefills; `firsts` are the packed tokens that begin them."""
    places, resumed, ends = [], [], []
    row = 0
    for chunk, first in zip(prefill, firsts, strict=False):
        wanted = chunk.scoring
        if wanted is None:
            continue
        table, positions = np.asarray(chunk.block_ids), np.arange(wanted.start, wanted.end)
        blocks, inside = np.divmod(positions + 1, block_size)
        places.append(table[blocks] * block_size + inside if wanted.keeps else np.zeros_like(positions))
        if wanted.start < chunk.start:
            resumed.append((row, table[wanted.start // block_size]))
        ends += [(first + (block + 1) * block_size - 1 - chunk.start, table[block]) for block in wanted.block_ends]
        row += len(positions)
    pairs = [np.asarray(one, dtype=np.int64).reshape(-1, 2).T for one in (resumed, ends)]
    return dict(zip(KEPT_PLACES, (np.concatenate(places), *pairs), strict=True))


def exchange_states(states: Tensor, hidden_states: Tensor, places: KeptPlaces, pool: LogProbPool) -> None:
    """Replace hidden states of scored tokens by kept ones, and keep the hidden states at the ends of blocks.

    Args:
        states: Input of the output layer at the scored tokens, [k, h].
        hidden_states: Input of the output layer at the step's packed tokens, [T, h].
        places: Places in `pool` to read and write.
        pool: Pool of log-probs.
    """
    (rows, blocks), (tokens, ended) = places.resumed, places.block_ends
    if len(rows):
        states.index_copy_(0, rows, pool.hidden_states[blocks].to(states.dtype))
    if len(tokens):
        pool.hidden_states.index_copy_(0, ended, hidden_states[tokens].to(pool.hidden_states.dtype))


def read_log_probs(pool: LogProbPool, blocks: Sequence[BlockId]) -> list[float]:
    """Return the log-probs of the tokens of a sequence's first blocks, from its second token on."""
    rows = to_device(torch.tensor(blocks), pool.values.device)
    kept: list[float] = pool.values[rows].flatten()[1:].tolist()
    return kept


def keep_log_probs(pool: LogProbPool, log_probs: Tensor, places: Tensor) -> None:
    """Write log-probs to their places, [k] each."""
    pool.values.view(-1).index_copy_(0, places, log_probs)
