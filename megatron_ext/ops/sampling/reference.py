"""Sampling in plain torch, on any device: sorts each row, in shapes that do not depend on the options.

Better tokens have a greater logit; of equal logits the one with the smaller id is better. A draw lays the weights of
tokens end to end, and takes the token at a place on that line.

Letters: r rows, V words, n intervals or blocks of some words, k tokens that a row keeps at most, or that are selected.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata

_ID_BITS = 32


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the first maximum of each row: [R, V] -> [R]. `argmax` is equal, but several times slower on a CPU."""
    return logits.max(-1).indices


def sample_tokens(logits: Tensor, metadata: SamplingMetadata, together: int | None = None) -> Tensor:
    """Draw a token for each row by inverting its distribution function; a greedy row takes its best token.

    Kept are the `top_k` best tokens, and of them the smallest set of best ones whose renormalised mass reaches `top_p`:
    those with less than `top_p` before them. Of equal logits, the one with the smaller id is better. The kept tokens
    are laid on a line in order of their ids, each as long as its mass; the token at `uniform` times the line's length
    is drawn.

    A row's token depends on that row alone, so a request gets the same sample alone and in any batch. Backends draw the
    same token unless `uniform` lies within 1e-5 of a border between two tokens, or `top_p` within 1e-5 of a value at
    which one token more or less would be kept. A row of NaN yields an arbitrary token.

    Args:
        logits: [R, V] of any type; -inf is never drawn.
        metadata: Sampling options of each row; nothing is read back, and no shape depends on them.
        together: Rows that are sorted at once where no kernel draws them, to bound memory; None for all.

    Returns:
        Ids [R] int64.
    """
    at_once = together or len(logits)
    if at_once >= len(logits):
        return draw_sorted(logits, metadata)
    pieces = [slice(start, start + at_once) for start in range(0, len(logits), at_once)]
    return torch.cat([draw_sorted(logits[rows], metadata.select(rows)) for rows in pieces])


def draw_sorted(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Sample with every row sorted, however few tokens it keeps."""
    words = logits.shape[1]
    ids, weights, is_kept = sort_rows(logits, metadata)
    reached = torch.zeros_like(weights).scatter_(1, ids, weights * is_kept).cumsum(-1)  # in order of ids
    drawn = owner(reached, metadata.uniform[:, None].clamp(min=0.0) * reached[:, -1:])[:, 0]
    return ids[:, 0].where(metadata.uniform < 0, drawn).clamp(0, words - 1)


def sort_rows(logits: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids of each row's tokens, best first, their weights at the row's temperature, and which are kept.

    Args:
        logits: [R, V] of any type.
        metadata: Sampling options of the rows.

    Returns:
        [R, V] int64, float64, and bool: which tokens `top_k` and `top_p` keep.
    """
    words = logits.shape[1]
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)  # of equal values, the smaller id first
    below = (values - values[:, :1]).double()
    weights = (below / metadata.temperature[:, None]).exp()
    max_k = metadata.top_k.where(metadata.top_k > 0, words)[:, None]
    is_best = torch.arange(words, device=logits.device) < max_k
    is_nucleus = (metadata.top_p > 0) & (metadata.top_p < 1)
    is_kept = is_best & kept_of_sorted(weights * is_best, metadata.top_p.where(is_nucleus, 2.0))
    return ids, weights, is_kept


def owner(reached: Tensor, place: Tensor) -> Tensor:
    """Return the index of the first interval that ends after a place: [r, 1].

    Args:
        reached: [r, n] fp64, end of each interval.
        place: [r, 1] fp64; a place at or, by rounding, after the line's end belongs to the last non-empty interval.
    """
    end = reached[:, -1:]
    place = place.minimum(end.nextafter(torch.zeros_like(end)))
    return torch.searchsorted(reached, place, right=True).clamp_(max=reached.shape[1] - 1)


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
