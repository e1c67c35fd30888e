"""Sampling with options on the device, in plain torch: every row is sorted, however few tokens it keeps.

No shape depends on the options, and nothing is read back. Letters: R rows, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops.sampling.inverse_cdf import owner
from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata
from megatron_ext.ops.sampling.top_k_top_p import kept_of_sorted


def draw_sorted(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Draw tokens as `draw_tokens` does: [R, V] -> [R]."""
    words, values = logits.shape[1], logits.float()
    values, ids = values.sort(dim=-1, descending=True, stable=True)  # of equal values, the smaller id first
    below = (values - values[:, :1]).double()
    weights = (below / metadata.temperature[:, None]).exp()
    most = metadata.top_k.where(metadata.top_k > 0, words)[:, None]
    weights = weights * (torch.arange(words, device=logits.device) < most)
    is_nucleus = (metadata.top_p > 0) & (metadata.top_p < 1)
    weights = weights * kept_of_sorted(weights, metadata.top_p.where(is_nucleus, 2.0))
    reached = torch.zeros_like(weights).scatter_(1, ids, weights).cumsum(-1)  # in order of ids
    drawn = owner(reached, metadata.uniform[:, None].clamp(min=0.0) * reached[:, -1:])[:, 0]
    return ids[:, 0].where(metadata.uniform < 0, drawn).clamp(0, words - 1)
