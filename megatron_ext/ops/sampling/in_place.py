"""Drawing tokens where the device has what rows ask for: every row the same way, no shape from what is asked.

All rows are ordered, whatever they keep, so this is for a device that has time for it and for steps that must be the
same program: fit for a CUDA graph. Letters: R rows, V words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.ops.sampling.cuts import kept_of_ordered
from megatron_ext.ops.sampling.number_line import owner


class Wishes(NamedTuple):
    """What R rows ask for, on the device.

    Attributes:
        temperature: [R] float64, positive.
        top_k: [R] int64, 0 is off.
        top_p: [R] float64 in [0, 1]; 0 and 1 are off.
        uniform: [R] float64 in [0, 1); below zero the row is greedy.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


def best_tokens_of(logits: Tensor) -> Tensor:
    """The first of the greatest logits of each row, as greedy requests ask for it: [R, V] -> [R]."""
    return logits.max(-1).indices


def draw_tokens(logits: Tensor, wishes: Wishes) -> Tensor:
    """As `sample_tokens`, greedy rows included: [R, V] -> [R]. Rows of NaN give some token."""
    words, values = logits.shape[1], logits.float()
    values, ids = values.sort(dim=-1, descending=True, stable=True)  # of equal ones the smaller id first
    below = (values - values[:, :1]).double()
    weights = (below / wishes.temperature[:, None]).exp()
    most = wishes.top_k.where(wishes.top_k > 0, words)[:, None]
    weights = weights * (torch.arange(words, device=logits.device) < most)
    is_nucleus = (wishes.top_p > 0) & (wishes.top_p < 1)
    weights = weights * kept_of_ordered(weights, wishes.top_p.where(is_nucleus, 2.0))
    reached = torch.zeros_like(weights).scatter_(1, ids, weights).cumsum(-1)  # in order of ids
    drawn = owner(reached, wishes.uniform[:, None].clamp(min=0.0) * reached[:, -1:])[:, 0]
    return ids[:, 0].where(wishes.uniform < 0, drawn).clamp(0, words - 1)
