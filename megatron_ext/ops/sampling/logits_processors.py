"""Logits processors in plain torch: one pass for all rows that need an operation, without loops over words.

Letters: r rows, V words, n tokens of all rows together. Logits are fp32, and modified in place unless noted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_BITS = 32  # bits of a mask element


@dataclass(frozen=True)
class CameBefore:
    """Tokens of several sequences, each once in its sequence.

    Attributes:
        rows: [n] int64, the row of each token.
        tokens: [n] int64.
        counts: [n] fp32, times the token was generated; 0 if it occurs in the prompt only.
    """

    rows: Tensor
    tokens: Tensor
    counts: Tensor


def penalize(logits: Tensor, before: CameBefore, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
    """Make tokens that occurred before less likely.

    Logits of prompt and generated tokens are divided by `repetition` if positive and multiplied by it if negative
    (Keskar et al. 2019, section 4.1). Then `frequency` for each occurrence and `presence` once are subtracted from
    those of generated tokens.

    Args:
        logits: [r, V].
        before: Tokens that occurred before.
        repetition: [r] fp32, positive; 1 is off.
        presence: [r] fp32.
        frequency: [r] fp32.
    """
    rows, counts = before.rows, before.counts
    values, factor = logits[rows, before.tokens], repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    values = values - frequency[rows] * counts - presence[rows] * (counts > 0)
    logits.index_put_((rows, before.tokens), values)


def add_biases(logits: Tensor, rows: Tensor, tokens: Tensor, biases: Tensor) -> None:
    """Add [n] biases to the logits [r, V] of n tokens; no row has a token twice.

    On CUDA `index_put_` would sort them first, and in some versions of torch read the size of the indices back.
    """
    logits.view(-1).scatter_add_(0, rows * logits.shape[1] + tokens, biases)


def keep_allowed(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Keep only the tokens whose mask bits are set, in some rows.

    Args:
        logits: [r, V].
        rows: [k] int64, ascending.
        masks: [k, ceil(V / 32)] int32; token t is bit t % 32 of number t / 32.
    """
    is_ruled_out = ~_bits(masks)[:, : logits.shape[1]]
    if len(rows) == len(logits):  # each row once, in order
        logits.masked_fill_(is_ruled_out, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(is_ruled_out, -torch.inf)


def _bits(masks: Tensor) -> Tensor:
    """Unpack masks [k, W] int32 to bits [k, 32 W] bool."""
    if masks.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")).bool()
    return bits_anywhere(masks)


def bits_anywhere(masks: Tensor) -> Tensor:
    """Unpack masks [k, W] int32 to bits [k, 32 W] bool, on any device; several times slower than `_bits` on a CPU."""
    bits = torch.arange(_BITS, dtype=torch.int32, device=masks.device)
    return (masks[:, :, None] >> bits).bitwise_and_(1).flatten(1).bool()


def rule_out(logits: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Exclude n tokens from rows of [r, V]; a row that would have none left is unchanged."""
    without = logits.index_put((rows, tokens), logits.new_full((), -torch.inf))
    is_empty = without.amax(-1, keepdim=True) == -torch.inf
    logits.copy_(torch.where(is_empty, logits, without))


def forbid(logits: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Exclude n tokens from rows of [r, V], even if none are left."""
    logits.index_put_((rows, tokens), logits.new_full((), -torch.inf))


def drop_improbable(logits: Tensor, temperature: Tensor, min_p: Tensor) -> None:
    """Keep the tokens that, at the temperature, have at least `min_p` of the best one's probability.

    Args:
        logits: [r, V].
        temperature: [r] fp64, positive.
        min_p: [r] fp64 from 0 (off) to 1.
    """
    limits = torch.finfo(torch.float32)
    reach = (min_p.log() * temperature).clamp(min=limits.min).float()[:, None]  # log 0 means no limit
    logits.masked_fill_(logits - logits.amax(-1, keepdim=True) < reach, -torch.inf)
