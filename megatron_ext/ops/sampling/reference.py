"""Sampling in plain torch, on any device; on a CPU rows with the same kind of filter are drawn together.

The filters top_k and top_p, and draws of the tokens that they keep, are computed without sorting the vocabulary. Better
tokens have a greater logit; of equal logits the one with the smaller id is better. A draw lays the weights of tokens
end to end, and takes the token at a place on that line.

Letters: r rows, V words, n blocks of some words, k tokens that a row keeps at most, or that are selected from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata

BLOCK = 128
"""Words whose weights are summed in fp32; sums of blocks are added in fp64."""

# Scores are binned in classes of width 1/32; scores more than 32 below the best fall into the last class.
CLASSES = 1024
CLASSES_PER_SCORE = 32

# A mass of 1 as an integer: sums of integers are exact in any order, on any device, with any other rows.
_MASS = 2.0**45

_ID_BITS = 32

# Logits that are drawn from in one pass on a CPU, few enough to stay in its cache.
CACHED_LOGITS = 1 << 18


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the first maximum of each row: [R, V] -> [R]. `argmax` is equal, but several times slower on a CPU."""
    return logits.max(-1).indices


def sample_tokens(logits: Tensor, metadata: SamplingMetadata, together: int | None = None) -> Tensor:
    if metadata.host is None or logits.is_cuda:  # options would have to be read back to branch on them
        return _draw_sorted_in_pieces(logits, metadata, together or len(logits))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows, draw_rows in _parts(metadata.host, logits):
        place = _as_slice(rows) or torch.from_numpy(rows)
        max_k = int(metadata.host["top_k"][rows].max())
        tokens[place] = draw_rows(logits[place], max_k, *(column[place] for column in metadata[:4]))
    return tokens.clamp_(max=logits.shape[1] - 1)  # rows of NaN may yield an index past the end


def _draw_sorted_in_pieces(logits: Tensor, metadata: SamplingMetadata, together: int) -> Tensor:
    if together >= len(logits):
        return draw_sorted(logits, metadata)
    pieces = [slice(start, start + together) for start in range(0, len(logits), together)]
    return torch.cat([draw_sorted(logits[rows], metadata.select(rows)) for rows in pieces])


def draw_sorted(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Sample with every row sorted, however few tokens it keeps, so that no shape depends on the options."""
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


def _parts(host: Mapping[str, np.ndarray], logits: Tensor) -> Iterator[tuple[np.ndarray, Callable[..., Tensor]]]:
    """Yield rows to draw together, as many as fit in one pass, and their draw function."""
    top_k, top_p = host["top_k"], host["top_p"]
    is_greedy = host["uniform"] < 0
    is_best = ~is_greedy & (top_k > 0) & (top_k < logits.shape[1])
    is_nucleus = ~(is_greedy | is_best) & (top_p > 0) & (top_p < 1)  # 1 keeps every possible token
    is_any = ~(is_greedy | is_best | is_nucleus)
    together = max(1, CACHED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    kinds = ((is_greedy, _take_best), (is_best, _draw_best), (is_nucleus, _draw_nucleus), (is_any, _draw_any))
    for chosen, draw_rows in kinds:
        rows = np.flatnonzero(chosen)
        for first in range(0, len(rows), together):
            yield rows[first : first + together], draw_rows


def _as_slice(rows: np.ndarray) -> slice | None:
    """Return ascending rows without a gap as a slice; None if there is a gap."""
    return slice(int(rows[0]), int(rows[-1]) + 1) if rows[-1] - rows[0] == len(rows) - 1 else None


def _take_best(logits: Tensor, *_: object) -> Tensor:
    return greedy_tokens(logits)


def _draw_any(logits: Tensor, _: int, temperature: Tensor, __: Tensor, ___: Tensor, uniform: Tensor) -> Tensor:
    return draw(scores(logits, temperature).softmax(-1), uniform)


def _draw_nucleus(logits: Tensor, _: int, temperature: Tensor, __: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    values = scores(logits, temperature)
    weights = values.softmax(-1)
    drop_beyond_nucleus(weights, values, logits, top_p)
    return draw(weights, uniform)


def _draw_best(
    logits: Tensor, max_k: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> Tensor:
    """Draw from the `top_k` best tokens of each row, at most `max_k`, that top_p keeps."""
    ids = best_tokens(logits, max_k)
    values = logits.gather(1, ids).double()
    weights = ((values - values[:, :1]) / temperature[:, None]).exp()
    weights = weights * (torch.arange(max_k, device=logits.device) < top_k[:, None])
    kept = kept_of_sorted(weights, top_p.where(top_p > 0, 2.0))
    return draw_picked(ids, weights * kept, uniform)


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
