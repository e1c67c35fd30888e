"""Mixture of experts written anew, token by token: no code is shared with megatron-core's routing and dispatching."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.config import ModelConfig


def reference_moe(layer: nn.Module, hidden: Tensor, config: ModelConfig) -> Tensor:
    """[T, h] -> [T, h] in fp64, differentiable in the layer's parameters and in `hidden`."""
    return torch.stack([_token(layer, token.double(), config)[0] for token in hidden])


def routing_margin(layer: nn.Module, hidden: Tensor, config: ModelConfig) -> float:
    """Smallest margin by which the router prefers its choices, over the tokens of `hidden` [T, h]."""
    return min(_token(layer, token.double(), config)[1] for token in hidden)


def _token(layer: nn.Module, x: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """Output [h] for one token [h], and the margin of its choice."""
    logits = layer.router.weight.double() @ x
    weights, margin = _weights(logits, layer.router.expert_bias, config)
    routed = x if config.moe_latent_size is None else layer.fc1_latent_proj.weight.double() @ x
    output = sum(
        weight * _mlp(layer.experts.local_experts[expert], routed, config) for expert, weight in weights.items()
    )
    if config.moe_latent_size is not None:
        output = layer.fc2_latent_proj.weight.double() @ output
    if config.moe_shared_expert_intermediate_size is not None:
        output = output + _mlp(layer.shared_experts, x, config)
    return output, margin


def _weights(logits: Tensor, bias: Tensor | None, config: ModelConfig) -> tuple[dict[int, Tensor], float]:
    """Each chosen expert's weight, and the margin."""
    ranks = logits if config.moe_router_score_function == "softmax" else logits.sigmoid()
    if bias is not None:
        ranks = ranks + bias.double()
    ranks, margin, groups = ranks.tolist(), math.inf, config.moe_router_num_groups or 1
    size, allowed = len(ranks) // groups, set(range(groups))
    if groups > 1:
        best = config.moe_router_topk // config.moe_router_group_topk
        sums = [sum(sorted(ranks[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
        chosen_groups, margin = _best(sums, config.moe_router_group_topk)
        allowed = set(chosen_groups)
    ranks = [rank if expert // size in allowed else -math.inf for expert, rank in enumerate(ranks)]
    chosen, margin_of_experts = _best(ranks, config.moe_router_topk)
    scores = logits[chosen].exp() if config.moe_router_score_function == "softmax" else logits[chosen].sigmoid()
    if len(chosen) > 1:
        scores = scores / scores.sum()
    scores = scores * (config.moe_router_topk_scaling_factor or 1.0)
    return dict(zip(chosen, scores, strict=True)), min(margin, margin_of_experts)


def _best(values: list[float], count: int) -> tuple[list[int], float]:
    """Indices of the largest values, and by how much they are larger than the next."""
    order = sorted(range(len(values)), key=lambda index: -values[index])
    margin = values[order[count - 1]] - values[order[count]] if count < len(values) else math.inf
    return order[:count], margin


def _mlp(mlp: nn.Module, x: Tensor, config: ModelConfig) -> Tensor:
    inner = mlp.linear_fc1.weight.double() @ x
    if config.swiglu:
        gate, value = inner.chunk(2)
        inner = F.silu(gate) * value
    else:
        inner = inner.clamp(min=0) ** 2 if config.squared_relu else F.gelu(inner)
    return mlp.linear_fc2.weight.double() @ inner
