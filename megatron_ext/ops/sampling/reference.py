"""Sampling in plain torch, on any device; on a CPU rows with the same kind of filter are drawn together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata
from megatron_ext.ops.sampling.top_k_top_p import (
    best_tokens,
    draw,
    draw_picked,
    drop_beyond_nucleus,
    kept_of_sorted,
    owner,
    scores,
)

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
