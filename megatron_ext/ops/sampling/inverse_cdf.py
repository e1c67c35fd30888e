"""Inverse-CDF draw: token weights laid end to end, and the token at a place on that line.

Letters: r rows, V words, n blocks of `BLOCK` words, k words selected from a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Words whose weights are summed in fp32; sums of blocks are added in fp64."""


def scores(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return logits relative to the best of the row, divided by the temperature: [r, V] fp32, the best 0.

    The best one is subtracted before the division, so that no temperature overflows; the temperature is clamped so that
    it cannot round to 0 or infinity.

    Args:
        logits: [r, V] of any type.
        temperature: [r] float64, positive.
    """
    limits = torch.finfo(torch.float32)
    divisor = temperature.clamp(limits.tiny, limits.max).float()[:, None]
    values = logits.float()
    return (values - values.amax(-1, keepdim=True)).div_(divisor)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the ids [r] of the words at the places `uniform` [r] fp64 of lines of words in order of their ids.

    Two searches, among the sums of blocks and within one block, avoid sorting and a running sum over the whole
    vocabulary. A word without weight is never drawn.

    Args:
        weights: [r, V] fp32, not negative, at least one of them positive in each row.
        uniform: [r] float64; times the row's sum, a place on its line.
    """
    rows, vocabulary = weights.shape
    padding = -vocabulary % BLOCK
    blocks = (F.pad(weights, (0, padding)) if padding else weights).view(rows, -1, BLOCK)
    reached = blocks.sum(-1).double().cumsum(-1)  # [r, n]
    place = uniform[:, None] * reached[:, -1:]
    block = owner(reached, place)
    before = reached.gather(1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0.0)
    own = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)  # [r, BLOCK]
    return (block * BLOCK + owner(own, place - before))[:, 0]


def draw_picked(ids: Tensor, weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw from a few words: their ids [r, k] in any order and their weights [r, k] fp64; see `draw`."""
    ids, order = ids.sort(-1)
    reached = weights.gather(1, order).cumsum(-1)
    return ids.gather(1, owner(reached, uniform[:, None] * reached[:, -1:]))[:, 0]


def owner(reached: Tensor, place: Tensor) -> Tensor:
    """Return the index of the first interval that ends after a place: [r, 1].

    Args:
        reached: [r, n] fp64, end of each interval.
        place: [r, 1] fp64; a place at or, by rounding, after the line's end belongs to the last non-empty interval.
    """
    end = reached[:, -1:]
    place = place.minimum(end.nextafter(torch.zeros_like(end)))
    return torch.searchsorted(reached, place, right=True).clamp_(max=reached.shape[1] - 1)
