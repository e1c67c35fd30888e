"""Filters top_k and top_p, and draws of tokens that they keep, computed without sorting the vocabulary.

Better tokens have a greater logit; of equal logits the one with the smaller id is better. A draw lays the weights of
tokens end to end, and takes the token at a place on that line.

Letters: r rows, V words, n blocks of some words, k tokens that a row keeps at most, or that are selected from it.
"""

from __future__ import annotations

import math

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


# Scores are binned in classes of width 1/32; scores more than 32 below the best fall into the last class.
CLASSES = 1024
CLASSES_PER_SCORE = 32

# A mass of 1 as an integer: sums of integers are exact in any order, on any device, with any other rows.
_MASS = 2.0**45

_ID_BITS = 32


def best_tokens(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the k best tokens of each row, best first: [r, V] -> [r, k].

    All of them lie in the k blocks with the best maxima: the tokens of any other block are worse than each of those k
    maxima.
    """
    rows, vocabulary = logits.shape
    size = 2 ** max(4, round(math.log2(vocabulary / k) / 2))
    count = -(-vocabulary // size)
    values = logits.float()
    if k >= count:
        return _best(values, torch.arange(vocabulary, device=logits.device), k)
    blocks = F.pad(values, (0, count * size - vocabulary), value=-math.inf).view(rows, count, size)
    chosen = _best(blocks.amax(-1), torch.arange(count, device=logits.device), k)  # [r, k]
    candidates = blocks.gather(1, chosen[:, :, None].expand(-1, -1, size)).flatten(1)  # [r, k * size]
    ids = (chosen[:, :, None] * size + torch.arange(size, device=logits.device)).flatten(1)
    return _best(candidates, ids, k)


def _best(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """Return the ids of the k best of some tokens, best first. Value and id form one number, so there are no ties."""
    last = (1 << _ID_BITS) - 1
    keys = ((ordered_bits(values).long() << _ID_BITS) + (last - ids)).topk(k, dim=-1).values
    return last - (keys & last)


def ordered_bits(values: Tensor) -> Tensor:
    """Return integers (int32) in the same order as fp32 values; equal ones for equal values, so for both zeros."""
    bits = (values + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def kept_of_sorted(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return which of the tokens in falling order top_p keeps, [r, k] bool: those whose preceding mass is below it.

    Args:
        weights: [r, k] fp64.
        top_p: [r] fp64.
    """
    reached = weights.cumsum(-1)
    return reached - weights < top_p[:, None] * reached[:, -1:]


def drop_beyond_nucleus(weights: Tensor, scores: Tensor, logits: Tensor, top_p: Tensor) -> None:
    """Set the weights of all tokens that top_p does not keep to zero.

    The masses of classes of tokens tell in which class top_p is reached. Better classes are kept, worse ones dropped,
    and only the tokens of that class are sorted.

    Args:
        weights: [r, V] fp32; modified.
        scores: [r, V] fp32; their exponentials are the weights up to a factor.
        logits: [r, V] fp32, which order tokens of one class.
        top_p: [r] fp64 between 0 and 1.
    """
    classes, masses = _classes(scores), (weights * _MASS).to(torch.int64)
    reached = masses.new_zeros(len(weights), CLASSES).scatter_add_(1, classes, masses).cumsum(-1).double()  # exact
    goal = top_p[:, None] * reached[:, -1:]
    border = owner(reached, goal)  # [r, 1]
    before = reached.gather(1, (border - 1).clamp_(min=0)).masked_fill_(border == 0, 0.0)
    rows, tokens = (classes == border).nonzero(as_tuple=True)
    order = ((rows << _ID_BITS) - ordered_bits(logits[rows, tokens].float())).argsort(
        stable=True
    )  # by row, best first, by id
    rows, tokens = rows[order], tokens[order]
    own = masses[rows, tokens]
    better = own.cumsum(0) - own  # includes earlier rows
    first = torch.searchsorted(rows, torch.arange(len(weights), device=rows.device))
    dropped = (better - better[first][rows]) + before[rows, 0] >= goal[rows, 0]
    weights.masked_fill_(classes > border, 0.0)
    weights[rows[dropped], tokens[dropped]] = 0.0


def _classes(scores: Tensor) -> Tensor:
    """Return the class of each score, 0 the best: [r, V] int64. `fmin` keeps rows of NaN in range."""
    return scores.mul(-CLASSES_PER_SCORE).fmin(scores.new_full((), CLASSES - 1.0)).to(torch.int64)
