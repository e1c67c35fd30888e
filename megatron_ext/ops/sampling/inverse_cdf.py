"""Weights of tokens laid end to end, and the token that lies at a place on that line.

Letters: r rows, V words, n blocks of `BLOCK` words, k words picked out of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Words whose weights are summed in fp32; sums of blocks are added in fp64."""


def scores(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits as far below their best as the temperature makes it: [r, V] fp32, the best 0.

    The best one is taken away before the division, so that no temperature overflows; nor may it round to 0 or infinity.

    Args:
        logits: [r, V] of any type.
        temperature: [r] float64, positive.
    """
    limits = torch.finfo(torch.float32)
    divisor = temperature.clamp(limits.tiny, limits.max).float()[:, None]
    values = logits.float()
    return (values - values.amax(-1, keepdim=True)).div_(divisor)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Ids [r] of the words that own the places `uniform` [r] fp64 of lines on which words stand in order of their ids.

    Two searches, among the sums of blocks and within one block: no word is ordered, and no running sum of a whole
    vocabulary is made. A word without weight is never met.

    Args:
        weights: [r, V] fp32, not negative, one of them positive in each row.
        uniform: [r] float64; times the row's sum it is a place on its line.
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
    """`draw` where only some words have weight: their ids [r, k] in any order and their weights [r, k] fp64."""
    ids, order = ids.sort(-1)
    reached = weights.gather(1, order).cumsum(-1)
    return ids.gather(1, owner(reached, uniform[:, None] * reached[:, -1:]))[:, 0]


def owner(reached: Tensor, place: Tensor) -> Tensor:
    """Index of the first interval that ends behind a place: [r, 1].

    Args:
        reached: [r, n] fp64, where each interval ends.
        place: [r, 1] fp64; one at the line's end or, by rounding, behind it belongs to the last interval with a length.
    """
    end = reached[:, -1:]
    place = place.minimum(end.nextafter(torch.zeros_like(end)))
    return torch.searchsorted(reached, place, right=True).clamp_(max=reached.shape[1] - 1)
