"""What is done to logits before a token is chosen, in plain torch: all rows that ask in one pass, no word one by one.

Letters: r rows, V words, n tokens of all rows together. Logits are fp32, and modified where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_BITS = 32  # of a word of a bit mask


@dataclass(frozen=True)
class CameBefore:
    """Tokens of several sequences, each once in its sequence.

    Attributes:
        rows: [n] int64, whose each is.
        tokens: [n] int64.
        counts: [n] fp32, how often it was generated; 0 where it is of the prompt only.
    """

    rows: Tensor
    tokens: Tensor
    counts: Tensor


def penalize(logits: Tensor, before: CameBefore, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
    """Make tokens that came less likely.

    Those of prompt and generation: divided by `repetition` above zero, multiplied by it below (Keskar et al. 2019,
    section 4.1). Then generated ones: less `frequency` for each time, and less `presence` once.

    Args:
        logits: [r, V].
        before: The tokens.
        repetition: [r] fp32, positive; 1 is none.
        presence: [r] fp32.
        frequency: [r] fp32.
    """
    rows, counts = before.rows, before.counts
    values, factor = logits[rows, before.tokens], repetition[rows]
    values = torch.where(values > 0, values / factor, values * factor)
    values = values - frequency[rows] * counts - presence[rows] * (counts > 0)
    logits.index_put_((rows, before.tokens), values)


def add_biases(logits: Tensor, rows: Tensor, tokens: Tensor, biases: Tensor) -> None:
    """Add [n] numbers to the logits [r, V] of n tokens, of which no row has one twice.

    On CUDA `index_put_` would order them first, and in some versions of torch read back how large the indices are.
    """
    logits.view(-1).scatter_add_(0, rows * logits.shape[1] + tokens, biases)


def keep_allowed(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Leave some rows the tokens whose bits are set.

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
    """[k, W] int32 -> [k, 32 W] bool."""
    if masks.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")).bool()
    return bits_anywhere(masks)


def bits_anywhere(masks: Tensor) -> Tensor:
    """Bits of masks, [k, W] int32 -> [k, 32 W] bool, on any device; on a CPU in several times the time."""
    bits = torch.arange(_BITS, dtype=torch.int32, device=masks.device)
    return (masks[:, :, None] >> bits).bitwise_and_(1).flatten(1).bool()


def rule_out(logits: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Take n tokens away from rows of [r, V]; a row that would have none left keeps what it has."""
    without = logits.index_put((rows, tokens), logits.new_full((), -torch.inf))
    is_empty = without.amax(-1, keepdim=True) == -torch.inf
    logits.copy_(torch.where(is_empty, logits, without))


def forbid(logits: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Take n tokens away from rows of [r, V], whatever is left."""
    logits.index_put_((rows, tokens), logits.new_full((), -torch.inf))


def drop_improbable(logits: Tensor, temperature: Tensor, min_p: Tensor) -> None:
    """Leave the tokens that, at the temperature, have at least `min_p` of the best one's probability.

    Args:
        logits: [r, V].
        temperature: [r] fp64, positive.
        min_p: [r] fp64 from 0 (off) to 1.
    """
    limits = torch.finfo(torch.float32)
    reach = (min_p.log() * temperature).clamp(min=limits.min).float()[:, None]  # log 0 is no limit
    logits.masked_fill_(logits - logits.amax(-1, keepdim=True) < reach, -torch.inf)
