"""Logits processors with options on the device: lists of fixed lengths, of which a prefix is used.

Applies the operations of `logits_processors.py` in their order to every row of a step; suitable for a CUDA graph. An
entry of a list is one number: a row, a token, and one bit. Letters: R rows, V words, n places of a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ext.ops.sampling.logits_processors import (
    CameBefore,
    add_biases,
    bits_anywhere,
    drop_improbable,
    forbid,
    penalize,
    rule_out,
)

_ROW_BITS = 32
_TOKEN_MASK = (1 << (_ROW_BITS - 1)) - 1


@dataclass(frozen=True)
class LogitsMetadata:
    """Logits processor options of all rows, on the device; entries are those of `pack`, and unused ones are arbitrary.

    Attributes:
        used: [4] int64, used entries of the four lists in this order.
        came: [n] int64, tokens of sequences, one entry per occurrence; the bit marks generated tokens.
        biased: [n] int64; no row has a token twice.
        ruled_out: [n] int64, not applied to a row that would have no tokens left.
        forbidden: [n] int64.
        biases: [n] float64, of `biased`.
        repetition: [R + 1] float64, positive; the last one, of the dummy row, is 1.
        presence: [R + 1] float64.
        frequency: [R + 1] float64.
        min_p: [R] float64 from 0 (off) to 1.
        temperature: [R] float64, positive.
    """

    used: Tensor
    came: Tensor
    biased: Tensor
    ruled_out: Tensor
    forbidden: Tensor
    biases: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    min_p: Tensor
    temperature: Tensor


def pack(row: int, tokens: np.ndarray, bit: np.ndarray | int = 0) -> np.ndarray:
    """Return list entries for the tokens [m] of a row: [m] int64."""
    return (row << _ROW_BITS) + (tokens.astype(np.int64) << 1) + bit


def process_logits(logits: Tensor, metadata: LogitsMetadata, masks: Tensor | None = None) -> Tensor:
    """Apply the logits processors; rows without any keep their logits: [R, V] -> [R, V] fp32.

    Args:
        logits: [R, V].
        metadata: Options of all rows.
        masks: [R, W] int32, W at least V / 32: token t is allowed if bit t % 32 of number t / 32 is set; None allows
            all tokens.
    """
    rows, words = logits.shape
    values = torch.zeros(rows + 1, words, dtype=torch.float32, device=logits.device)  # the last row is a dummy
    values[:rows].copy_(logits)
    lists = (metadata.came, metadata.biased, metadata.ruled_out, metadata.forbidden)
    came, biased, ruled_out, forbidden = (
        _unpack(entries, count, rows, words) for entries, count in zip(lists, metadata.used.unbind(), strict=True)
    )
    factors = metadata.repetition.float(), metadata.presence.float(), metadata.frequency.float()
    penalize(values, _counted(came, values), *factors)
    add_biases(values, biased.rows, biased.tokens, metadata.biases.float())
    if masks is not None:
        values[:rows].masked_fill_(~bits_anywhere(masks)[:, :words], -torch.inf)
    rule_out(values, ruled_out.rows, ruled_out.tokens)
    forbid(values, forbidden.rows, forbidden.tokens)
    drop_improbable(values[:rows], metadata.temperature, metadata.min_p)
    return values[:rows]


class _Entries(NamedTuple):
    """Unpacked list, [n] int64 each; unused entries point to the dummy last row, spread over its words.

    Entries are spread because a device adds to the same place one by one.
    """

    rows: Tensor
    tokens: Tensor
    bits: Tensor


def _unpack(entries: Tensor, count: Tensor, nobody: int, words: int) -> _Entries:
    places = torch.arange(len(entries), device=entries.device)
    is_unused = places >= count
    return _Entries(
        (entries >> _ROW_BITS).masked_fill(is_unused, nobody),
        (places % words).where(is_unused, (entries >> 1) & _TOKEN_MASK),
        (entries & 1).masked_fill(is_unused, 0),
    )


def _counted(came: _Entries, values: Tensor) -> CameBefore:
    """Return how often each token was generated; a token that occurs twice has two entries with the same count."""
    places = came.rows * values.shape[1] + came.tokens
    counts = torch.zeros(values.numel(), dtype=torch.float32, device=values.device)
    counts.scatter_add_(0, places, came.bits.float())  # whole numbers: exact in any order
    return CameBefore(came.rows, came.tokens, counts[places])
