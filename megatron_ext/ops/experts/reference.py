"""Choice of experts, sorting by expert and weighted sums in plain torch, on any device."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.ops.backends import Backend, anything


class Function(enum.IntEnum):
    """Function that turns logits into scores."""

    SOFTMAX_OF_CHOSEN = 0
    SOFTMAX_OF_ALL = 1
    SIGMOID = 2


@dataclass(frozen=True)
class Scores:
    """Scores and weights of experts.

    Attributes:
        function: Function of the logits. Sigmoids of chosen experts are divided by their sum if there are several.
        factor: Factor of the weights.
    """

    function: Function
    factor: float = 1.0


class SortedTokens(NamedTuple):
    """Pairs of token and expert, sorted by expert.

    Attributes:
        tokens: [T k] int32, token of each pair in sorted order.
        places: [T, k] int32, place of each pair in sorted order.
        ends: [E] int32, number of pairs up to and with each expert.
    """

    tokens: Tensor
    places: Tensor
    ends: Tensor


@dataclass(frozen=True)
class ExpertsBackend(Backend):
    """Backend of the operations around experts, with the signatures of the package's functions.

    Attributes:
        choose_experts: See the package.
        sort_by_expert: See the package.
        combine: See the package.
    """

    choose_experts: Callable[[Tensor, Tensor | None, int, Scores], tuple[Tensor, Tensor]]
    sort_by_expert: Callable[[Tensor, int], SortedTokens]
    combine: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def choose_experts(logits: Tensor, bias: Tensor | None, chosen: int, scores: Scores) -> tuple[Tensor, Tensor]:
    values = logits.float()
    if scores.function == Function.SIGMOID:
        values = values.sigmoid()
    elif scores.function == Function.SOFTMAX_OF_ALL:
        values = values.softmax(-1)
    ids = (values if bias is None else values + bias).topk(chosen, dim=1).indices
    weights = values.gather(1, ids)
    if scores.function == Function.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    elif scores.function == Function.SIGMOID and chosen > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * scores.factor


def sort_by_expert(ids: Tensor, experts: int) -> SortedTokens:
    order = ids.flatten().argsort(stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    ends = ids.flatten().bincount(minlength=experts).cumsum(0).to(torch.int32)
    return SortedTokens((order // ids.shape[1]).to(torch.int32), places.view_as(ids), ends)


def combine(rows: Tensor, places: Tensor, weights: Tensor, other: Tensor | None) -> Tensor:
    total = (rows[places.long()].float() * weights[..., None]).sum(1)
    return (total if other is None else total + other.float()).to(rows.dtype)


BACKEND = ExpertsBackend("reference", anything, choose_experts, sort_by_expert, combine)
