"""Operations around the products of an MoE layer's experts, in shapes that do not depend on the routing.

Tokens are sorted by expert, so that one grouped product computes each of the experts' weights: `choose_experts`, then
`sort_by_expert`, rows `tokens` of the inputs, the products over the groups that end at `ends`, and `combine`.

Letters: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.experts import reference, triton
from megatron_ext.ops.experts.reference import Scores, SortedTokens

EXPERTS = Backends("experts", triton.BACKEND, reference.BACKEND)


def choose_experts(logits: Tensor, bias: Tensor | None, chosen: int, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return the experts [T, k] int32 of each token, by falling score, and their weights [T, k] fp32.

    Args:
        logits: [T, E], of the router.
        bias: [E] fp32, added to scores for the choice only.
        chosen: k.
        scores: How scores and weights follow from logits.
    """
    return EXPERTS.compute(logits, lambda backend: backend.choose_experts(logits, bias, chosen, scores))


def sort_by_expert(ids: Tensor, experts: int) -> SortedTokens:
    """Sort pairs of token and expert, `ids` [T, k] int32, by expert, then by token."""
    return EXPERTS.compute(ids, lambda backend: backend.sort_by_expert(ids, experts))


def combine(rows: Tensor, places: Tensor, weights: Tensor, other: Tensor | None) -> Tensor:
    """Return the weighted sum of each token's rows, and of `other` [T, h] with the weight 1: [T, h], rounded once.

    Args:
        rows: [T k, h], outputs of experts in sorted order.
        places: [T, k] int32, the row of each pair.
        weights: [T, k] fp32.
        other: Outputs of shared experts.
    """
    return EXPERTS.compute(rows, lambda backend: backend.combine(rows, places, weights, other))


__all__ = ["EXPERTS", "Scores", "SortedTokens", "choose_experts", "combine", "sort_by_expert"]
