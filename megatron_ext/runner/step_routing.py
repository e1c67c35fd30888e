"""Routing indices of a step, collected from the routers of its forward."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

from megatron_ext.runner.model_input import ModelInput
from megatron_ext.scheduling.routing_indices import RoutingIndices

_recorded: ContextVar[list[Tensor] | None] = ContextVar("recorded_routing", default=None)


@contextlib.contextmanager
def recorded_routing() -> Iterator[list[Tensor]]:
    """Collect what `record_routing` is given inside this context, a tensor for each MoE layer in their order."""
    tensors: list[Tensor] = []
    token = _recorded.set(tensors)
    try:
        yield tensors
    finally:
        _recorded.reset(token)


def is_routing_recorded() -> bool:
    """Return whether this is inside `recorded_routing`."""
    return _recorded.get() is not None


def record_routing(probs: Tensor, routing_map: Tensor, topk: int) -> None:
    """Record a layer's routing, inside `recorded_routing` only.

    Args:
        probs: [T, experts], weights of the experts.
        routing_map: [T, experts], True for the k experts of a token.
        topk: k.
    """
    tensors = _recorded.get()
    if tensors is not None:
        tensors.append(probs.masked_fill(~routing_map, -torch.inf).topk(topk, dim=-1).indices.to(torch.int32))


def routing_by_request(recorded: Sequence[Tensor], step: ModelInput) -> dict[int, RoutingIndices]:
    """Return the routing indices of each request's chunk, its experts ordered by falling weight.

    Args:
        recorded: [T, k] of each MoE layer.
        step: Step that was computed.
    """
    if not recorded:
        return {}
    layers, topk = len(recorded), recorded[0].shape[-1]
    numbers = torch.stack(list(recorded), dim=1)[: step.num_tokens].cpu().numpy()
    ends = itertools.accumulate(chunk.length for chunk in step.chunks)
    return {
        chunk.request_id: RoutingIndices(numbers[end - chunk.length : end].tobytes(), layers, topk)
        for chunk, end in zip(step.chunks, ends, strict=True)
    }
