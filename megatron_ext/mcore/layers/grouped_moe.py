"""Grouped MoE: experts of an MoE layer on a CUDA device as two grouped products, in eager and in captured steps.

Tokens are sorted by expert on the device, `torch.nn.functional.grouped_mm` multiplies the tokens of each expert with
its weights, and sums over a token's experts are rounded once. Nothing is read back, nothing is dropped, no expert has a
capacity, and only weights of experts with tokens are read. torch has such a product for bf16 on devices of compute
capability 9 and 10; elsewhere it reads the groups back, and the plain layer or `dense_moe` computes the experts.

Letters: T tokens, E experts, k experts of a token, i channels of inputs and outputs, f channels of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ext.mcore.layers.dense_moe import stacked, why_not_dense
from megatron_ext.mcore.layers.mlp import activate_in_place
from megatron_ext.mcore.layers.token_dispatch import is_alone
from megatron_ext.ops import experts as operators
from megatron_ext.ops import triton
from megatron_ext.ops.experts import Function, Scores
from megatron_ext.runner.step_routing import is_routing_recorded

if TYPE_CHECKING:
    from megatron_ext.mcore.layers.moe import EagerRouter, LocalMoELayer

_CAPABILITIES = (9, 10)
"""Major compute capabilities of devices on which torch's grouped product does not read the groups back."""
_ALIGNMENT = 16
"""Bytes of which each row of weights must be a multiple."""


def supports(layer: LocalMoELayer, hidden: Tensor) -> bool:
    """Return whether this module computes a layer for hidden states like these."""
    if torch.is_grad_enabled() or operators.EXPERTS.choose(hidden).name != triton.NAME:
        return False
    return _multiplies(hidden) and not is_routing_recorded() and why_unsupported(layer) is None


def why_unsupported(layer: LocalMoELayer) -> str | None:
    """Return why the layer cannot be computed in this way; None if it can."""
    config, experts = layer.config, layer.experts
    if not is_alone(layer.groups):
        return "experts are on several ranks"
    if config.moe_router_group_topk and config.moe_router_group_topk < (config.moe_router_num_groups or 1):
        return "experts are chosen by groups"
    if config.moe_router_load_balancing_type == "sinkhorn" or config.moe_router_force_load_balancing:
        return "tokens are balanced among experts"
    if config.moe_shared_expert_overlap:
        return "shared experts overlap the dispatch"
    problem = why_not_dense(experts)
    if problem is not None:
        return problem
    first = experts.local_experts[0]
    sizes = (weight.shape[1] * weight.element_size() for weight in (first.linear_fc1.weight, first.linear_fc2.weight))
    return "rows of weights are not multiples of 16 bytes" if any(size % _ALIGNMENT for size in sizes) else None


def compute(layer: LocalMoELayer, hidden: Tensor) -> Tensor:
    """Compute an MoE layer: [s, b, h] -> [s, b, h]."""
    config, tokens = layer.config, hidden.flatten(0, 1)
    shared = _shared_experts(layer, hidden)
    logits = _logits(layer.router, tokens)
    ids, weights = operators.choose_experts(logits, layer.router.expert_bias, layer.router.topk, _scores(layer.router))
    groups = operators.sort_by_expert(ids, logits.shape[1])
    inputs = layer.fc1_latent_proj(tokens)[0] if config.moe_latent_size else tokens
    experts = list(layer.experts.local_experts)
    first, last = _stacked([one.linear_fc1 for one in experts]), _stacked([one.linear_fc2 for one in experts])
    inner = F.grouped_mm(inputs.index_select(0, groups.tokens), first.transpose(1, 2), offs=groups.ends)
    inner = activate_in_place(layer.experts.config, inner)
    rows = F.grouped_mm(inner, last.transpose(1, 2), offs=groups.ends)
    if not config.moe_latent_size:
        other = None if shared is None else shared.flatten(0, 1)
        return operators.combine(rows, groups.places, weights, other).view_as(hidden)
    output = cast("Tensor", layer.fc2_latent_proj(operators.combine(rows, groups.places, weights, None))[0])
    return (output if shared is None else output + shared.flatten(0, 1)).view_as(hidden)


def _multiplies(hidden: Tensor) -> bool:
    """Return whether torch has a grouped product that does not wait for the device."""
    if not hasattr(F, "grouped_mm"):
        return False
    if not hidden.is_cuda or triton.is_interpreted():  # a device of tests
        return True
    return hidden.dtype == torch.bfloat16 and torch.cuda.get_device_capability(hidden.device)[0] in _CAPABILITIES


def _shared_experts(layer: LocalMoELayer, hidden: Tensor) -> Tensor | None:
    """Compute the shared experts, with their activation in one launch; None without shared experts."""
    shared = layer.shared_experts
    if shared is None:
        return None
    inner, _ = shared.linear_fc1(hidden)
    output, _ = shared.linear_fc2(activate_in_place(shared.config, inner))
    return output * F.linear(hidden, shared.gate_weight).sigmoid() if shared.use_shared_expert_gate else output


def _logits(router: EagerRouter, tokens: Tensor) -> Tensor:
    """Compute the router's logits [T, E]; of 16-bit inputs in fp32 by one product, without copies of the weights."""
    weight, is_wide = router.weight, router.config.moe_router_dtype == "fp32"
    if is_wide and tokens.is_cuda and not triton.is_interpreted() and router.bias is None:
        return torch.mm(tokens, weight.t(), out_dtype=torch.float32)
    return router.gating(tokens)


def _scores(router: EagerRouter) -> Scores:
    function = Function.SOFTMAX_OF_ALL if router.config.moe_router_pre_softmax else Function.SOFTMAX_OF_CHOSEN
    if router.score_function == "sigmoid":
        function = Function.SIGMOID
    return Scores(function, router.config.moe_router_topk_scaling_factor or 1.0)


_ADDRESSES: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()
"""First layer of contiguous weights -> addresses of all weights."""


def _stacked(layers: Sequence[nn.Module]) -> Tensor:
    """Return the weights of the experts' layers as one tensor, [E, out, in], after moving them into contiguous memory.

    Addresses tell whether they are still there: to look at each weight's storage would take the host as long as the
    rest of the layer.
    """
    weights = [cast("nn.Parameter", layer.weight) for layer in layers]
    addresses, first, size = tuple(one.data_ptr() for one in weights), weights[0].detach(), weights[0].numel()
    room = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if _ADDRESSES.get(layers[0]) == addresses and room >= size * len(weights):
        return first.as_strided((len(weights), *first.shape), (size, *first.stride()))
    whole = stacked(weights)
    _ADDRESSES[layers[0]] = tuple(one.data_ptr() for one in weights)
    return whole
