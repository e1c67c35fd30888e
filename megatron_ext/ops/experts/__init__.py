"""Operations around the products of an MoE layer's experts, in shapes that do not depend on the routing.

Tokens are sorted by expert, so that one grouped product computes each of the experts' weights: `choose_experts`, then
`sort_by_expert`, rows `tokens` of the inputs, the products over the groups that end at `ends`, and `combine`.

Letters: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import Operator

EXPERTS = Operator("experts", triton.backend(__name__))


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


@EXPERTS
def choose_experts(logits: Tensor, bias: Tensor | None, chosen: int, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the experts [T, k] int32 of each token, by falling score, and their weights [T, k] fp32.

    Args:
        logits: [T, E], of the router.
        bias: [E] fp32, added to scores for the choice only.
        chosen: k.
        scores: How scores and weights follow from logits.
    """
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


@EXPERTS
def sort_by_expert(ids: Tensor, experts: int) -> SortedTokens:
    """Sort pairs of token and expert, `ids` [T, k] int32, by expert, then by token."""
    order = ids.flatten().argsort(stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    ends = ids.flatten().bincount(minlength=experts).cumsum(0).to(torch.int32)
    return SortedTokens((order // ids.shape[1]).to(torch.int32), places.view_as(ids), ends)


@EXPERTS
def combine(rows: Tensor, places: Tensor, weights: Tensor, other: Tensor | None) -> Tensor:
    """Return the weighted sum of each token's rows, and of `other` [T, h] with the weight 1: [T, h], rounded once.

    Args:
        rows: [T k, h], outputs of experts in sorted order.
        places: [T, k] int32, the row of each pair.
        weights: [T, k] fp32.
        other: Outputs of shared experts.
    """
    total = (rows[places.long()].float() * weights[..., None]).sum(1)
    return (total if other is None else total + other.float()).to(rows.dtype)
