"""Sampling in plain torch, on any device; rows with the same kind of filter are drawn together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ext.ops.backends import anything
from megatron_ext.ops.sampling.inverse_cdf import draw, draw_picked, scores
from megatron_ext.ops.sampling.sampling_metadata import SamplingBatch, SamplingMetadata
from megatron_ext.ops.sampling.sorted_sampling import draw_sorted
from megatron_ext.ops.sampling.top_k_top_p import best_tokens, drop_beyond_nucleus, kept_of_sorted
from megatron_ext.ops.step_metadata import to_device

# Logits that are drawn from in one pass on a CPU, few enough to stay in its cache.
CACHED_LOGITS = 1 << 18


@dataclass(frozen=True)
class SamplingBackend:
    """Backend of sampling.

    Attributes:
        name: Unique among the backends.
        takes: Returns whether the backend supports given logits.
        sample: Function with the signature of `sample_tokens`.
        draw: Samples with metadata on the device, greedy rows included, without reading it back: (logits [R, V],
            `SamplingMetadata`) -> [R]; returns None for logits that it does not support.
    """

    name: str
    takes: Callable[[Tensor], bool]
    sample: Callable[..., Tensor]
    draw: Callable[[Tensor, SamplingMetadata], Tensor | None] | None = None


def sample_tokens(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See the operator."""
    columns = to_device(
        torch.from_numpy(np.stack([batch.temperature, batch.top_k, batch.top_p, batch.uniform])), logits.device
    )
    if logits.is_cuda:  # the code below branches on values that would have to be read back
        return draw_sorted(logits, SamplingMetadata(*columns))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows, draw_rows in _parts(batch, logits):
        place = _as_slice(rows) or torch.from_numpy(rows)
        tokens[place] = draw_rows(logits[place], int(batch.top_k[rows].max()), *columns[:, place])
    return tokens.clamp_(max=logits.shape[1] - 1)  # rows of NaN may yield an index past the end


def _parts(batch: SamplingBatch, logits: Tensor) -> Iterator[tuple[np.ndarray, Callable[..., Tensor]]]:
    """Yield rows to draw together, as many as fit in one pass, and their draw function."""
    is_best = (batch.top_k > 0) & (batch.top_k < logits.shape[1])
    is_nucleus = ~is_best & (batch.top_p > 0) & (batch.top_p < 1)  # 1 keeps every possible token
    together = max(1, CACHED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    for chosen, draw_rows in ((is_best, _draw_best), (is_nucleus, _draw_nucleus), (~(is_best | is_nucleus), _draw_any)):
        rows = np.flatnonzero(chosen)
        for first in range(0, len(rows), together):
            yield rows[first : first + together], draw_rows


def _as_slice(rows: np.ndarray) -> slice | None:
    """Return ascending rows without a gap as a slice; None if there is a gap."""
    return slice(int(rows[0]), int(rows[-1]) + 1) if rows[-1] - rows[0] == len(rows) - 1 else None


def _draw_any(logits: Tensor, _: int, temperature: Tensor, __: Tensor, ___: Tensor, uniform: Tensor) -> Tensor:
    return draw(scores(logits, temperature).softmax(-1), uniform)


def _draw_nucleus(logits: Tensor, _: int, temperature: Tensor, __: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    values = scores(logits, temperature)
    weights = values.softmax(-1)
    drop_beyond_nucleus(weights, values, logits, top_p)
    return draw(weights, uniform)


def _draw_best(logits: Tensor, most: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw from the `top_k` best tokens of each row, at most `most`, that top_p keeps."""
    ids = best_tokens(logits, most)
    values = logits.gather(1, ids).double()
    weights = ((values - values[:, :1]) / temperature[:, None]).exp()
    weights = weights * (torch.arange(most, device=logits.device) < top_k[:, None])
    kept = kept_of_sorted(weights, top_p.where(top_p > 0, 2.0))
    return draw_picked(ids, weights * kept, uniform)


BACKEND = SamplingBackend("reference", anything, sample_tokens)
