"""Dense MoE: experts of an MoE layer with shapes that do not depend on the routing, as CUDA graphs need.

Each token is computed by exactly the experts that its router chose: nothing is dropped, no expert has a capacity. There
are two ways, chosen by shapes alone:

    all      every expert computes every token, and unrouted results are masked before the last product: the weights of
             all experts are read, once
    picked   for few tokens: the weights of each token's experts are gathered, which moves three times their bytes; this
             is less than reading all weights if there are many more experts than tokens times chosen experts

Sums over experts are in fp32, rounded once; upstream rounds each time. Letters: T tokens, E experts, k experts per
token, i channels of inputs and outputs, f channels of an expert, g outputs of its first product: f, or 2 f with a gated
unit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Final

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

_PICKED_BELOW: Final = 4  # times fewer picks than experts; copying reads and writes, and the product reads again
_BYTES: Final = 256 * 1024**2  # of results at once; more experts are computed one group after another
_is_fixed: ContextVar[bool] = ContextVar("fixed_shapes", default=False)


@contextlib.contextmanager
def fixed_shapes() -> Iterator[None]:
    """Make the shapes of this thread's MoE layers depend on their inputs' shapes only, inside this context."""
    token = _is_fixed.set(True)
    try:
        yield
    finally:
        _is_fixed.reset(token)


def has_fixed_shapes() -> bool:
    """Return whether `fixed_shapes` is active here."""
    return _is_fixed.get()


def why_not_dense(experts: nn.Module) -> str | None:
    """Return why these experts cannot be computed with fixed shapes; None if they can."""
    if not isinstance(experts, SequentialMLP):
        return f"experts of an MoE layer are {type(experts).__name__}"
    config = experts.config
    if config.activation_func_clamp_value is not None or config.glu_linear_offset != 0.0:
        return "experts of an MoE layer clamp or shift their activations"
    if config.use_te_activation_func or config.bias_activation_fusion or config.add_bias_linear:
        return "experts of an MoE layer have biases or fused activations"
    if config.moe_expert_capacity_factor is not None:
        return "experts of an MoE layer drop tokens"
    return None


def compute_experts(experts: SequentialMLP, hidden: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
    """Compute each token by its experts, times their weights: [T, i] -> [T, i].

    Args:
        experts: Experts of the layer; their weights are moved into contiguous memory.
        hidden: [T, i].
        probs: [T, E] fp32 or fp64, the router's weights.
        routing_map: [T, E] bool, k true values per row.
    """
    layers = list(experts.local_experts)
    first = stacked([one.linear_fc1.weight for one in layers])
    last = stacked([one.linear_fc2.weight for one in layers])
    chosen = min(experts.config.moe_router_topk, len(layers))
    if _PICKED_BELOW * len(hidden) * chosen <= len(layers):
        return _picked(experts.config, hidden, probs, routing_map, (first, last), chosen)
    return _all(experts.config, hidden, probs, routing_map, (first, last))


def stacked(weights: Sequence[nn.Parameter]) -> Tensor:
    """Return weights of equal shapes as one tensor, [E, out, in]; they become views of it if they are not yet.

    The parameters stay the same objects, and in-place writes to them reach the tensor.
    """
    first, size = weights[0], weights[0].numel()
    storage, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    if all(
        one.untyped_storage().data_ptr() == storage and one.storage_offset() == begin + i * size and one.is_contiguous()
        for i, one in enumerate(weights)
    ):
        return first.detach().as_strided((len(weights), *first.shape), (size, *first.stride()))
    with torch.inference_mode(mode=False), torch.no_grad():
        whole = torch.stack([one.detach() for one in weights])
        for one, part in zip(weights, whole.unbind(), strict=True):
            one.data = part
    return whole


def _all(
    config: TransformerConfig, hidden: Tensor, probs: Tensor, routing_map: Tensor, weights: tuple[Tensor, Tensor]
) -> Tensor:
    tokens, (first, last) = len(hidden), weights
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    each = max(1, tokens) * 4 * (last.shape[1] + 2 * first.shape[1])  # bytes of one expert's results
    at_once = max(1, _BYTES // each)
    for start in range(0, len(first), at_once):
        some = slice(start, start + at_once)
        inner = F.linear(hidden, first[some].flatten(0, 1)).unflatten(1, (-1, first.shape[1]))  # [T, E, g]
        scaled = (_activate(config, inner) * probs[:, some, None]).to(hidden.dtype)
        scaled = scaled.masked_fill(~routing_map[:, some, None], 0.0)  # mask every value, NaN as well
        total += torch.bmm(scaled.transpose(0, 1), last[some].transpose(1, 2)).sum(0, dtype=torch.float32)
    return total.to(hidden.dtype)


def _picked(
    config: TransformerConfig,
    hidden: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    weights: tuple[Tensor, Tensor],
    chosen: int,
) -> Tensor:
    ids = routing_map.to(torch.int32).topk(chosen, dim=1).indices  # [T, k]
    first, last = (one.index_select(0, ids.flatten()) for one in weights)  # [T k, g, i], [T k, i, f]
    inputs = hidden[:, None].expand(-1, chosen, -1).flatten(0, 1)
    inner = _activate(config, torch.bmm(first, inputs[..., None])[..., 0])  # [T k, f]
    scaled = (inner * probs.gather(1, ids).flatten()[:, None]).to(hidden.dtype)
    outputs = torch.bmm(last, scaled[..., None])[..., 0]  # [T k, i]
    return outputs.unflatten(0, (-1, chosen)).sum(1, dtype=torch.float32).to(hidden.dtype)


def _activate(config: TransformerConfig, inner: Tensor) -> Tensor:
    """Apply the activation: [..., g] -> [..., f]."""
    if not config.gated_linear_unit:
        return config.activation_func(inner)
    gate, up = inner.chunk(2, dim=-1)
    return config.activation_func(gate) * up
