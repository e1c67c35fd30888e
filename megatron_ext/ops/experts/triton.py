"""Operations around experts in Triton, for CUDA devices: one launch each, with the kernels in `kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.experts.reference import ExpertsBackend, Scores, SortedTokens
from megatron_ext.ops.triton.launching import rowed, rows_of


def _require(experts: int, chosen: int) -> None:
    """Raise `NoKernelError` unless a kernel chooses `chosen` of `experts` experts."""
    from megatron_ext.ops.experts import kernels

    largest = kernels.choose_experts.configs[-1]
    most, of = largest["CHOSEN"], largest["BLOCK"]
    if experts > of or chosen > most:
        raise NoKernelError(f"no kernel chooses {chosen} of {experts} experts, only {most} of {of}")


def choose_experts(logits: Tensor, bias: Tensor | None, chosen: int, scores: Scores) -> tuple[Tensor, Tensor]:
    from megatron_ext.ops.experts import kernels

    tokens, experts = logits.shape
    _require(experts, chosen)
    kernels.choose_experts.require(T=logits.dtype)
    ids = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    kernels.choose_experts.launch(
        (tokens,),
        kernels.choose_experts.config_for(logits.dtype, BLOCK=experts),
        **rowed(logits=logits),
        bias=weights if bias is None else bias.float().contiguous(),  # the stand-in for None is not read
        ids=ids,
        weights=weights,
        experts=experts,
        chosen=chosen,
        function=scores.function.value,
        has_bias=int(bias is not None),
        factor=scores.factor,
    )
    return ids, weights


def sort_by_expert(ids: Tensor, experts: int) -> SortedTokens:
    from megatron_ext.ops.experts import kernels

    (config,), ids = kernels.sort_by_expert.configs, ids.contiguous()
    tokens, places = torch.empty_like(ids).flatten(), torch.empty_like(ids)
    ends = torch.empty(experts, dtype=torch.int32, device=ids.device)
    kernels.sort_by_expert.launch(
        (experts,),
        config,
        ids=ids,
        tokens=tokens,
        places=places,
        offsets=ends,
        pairs=ids.numel(),
        chosen=ids.shape[1],
    )
    return SortedTokens(tokens, places, ends)


def combine(rows: Tensor, places: Tensor, weights: Tensor, other: Tensor | None) -> Tensor:
    from megatron_ext.ops.experts import kernels

    (tokens, chosen), channels = places.shape, rows.shape[1]
    _require(0, chosen)
    kernels.combine.require(T=rows.dtype)
    config, y = kernels.combine.config_for(rows.dtype, CHOSEN=chosen), rows.new_empty(tokens, channels)
    kernels.combine.launch(
        (tokens, -(-channels // config["BLOCK"])),
        config,
        rows=rows_of(rows),
        **rowed(other=y if other is None else other),  # the stand-in for None is not read
        places=places,
        weights=weights,
        y=y,
        channels=channels,
        chosen=chosen,
        has_other=int(other is not None),
    )
    return y


BACKEND = ExpertsBackend(triton.NAME, triton.takes, choose_experts, sort_by_expert, combine)
