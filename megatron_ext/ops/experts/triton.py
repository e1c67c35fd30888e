"""Operations around experts in Triton, for CUDA devices: one launch each, with the kernels in `kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.experts import reference
from megatron_ext.ops.experts.reference import ExpertsBackend, Scores, SortedTokens
from megatron_ext.ops.triton.launching import rows_of, say_reference_computes


def _too_many(experts: int, chosen: int) -> str | None:
    """Return why no kernel chooses `chosen` of `experts` experts; None if one does."""
    from megatron_ext.ops.experts import kernels

    largest = kernels.choose_experts.configs[-1]
    if experts > largest["BLOCK"] or chosen > largest["CHOSEN"]:
        return f"no kernel chooses {chosen} of {experts} experts, only {largest['CHOSEN']} of {largest['BLOCK']}"
    return None


def choose_experts(logits: Tensor, bias: Tensor | None, chosen: int, scores: Scores) -> tuple[Tensor, Tensor]:
    from megatron_ext.ops.experts import kernels

    tokens, experts = logits.shape
    lack = _too_many(experts, chosen) or kernels.choose_experts.lacks(T=logits.dtype)
    if lack is not None:
        say_reference_computes(lack)
        return reference.choose_experts(logits, bias, chosen, scores)
    config = kernels.choose_experts.fitting(logits.dtype, BLOCK=experts)
    assert config is not None, "see `_too_many`"
    logits = rows_of(logits)
    ids = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    kernels.choose_experts.launch(
        (tokens,),
        config,
        logits=logits,
        bias=weights if bias is None else bias.float().contiguous(),  # the stand-in for None is not read
        ids=ids,
        weights=weights,
        logits_row=logits.stride(0),
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
    lack = _too_many(0, chosen) or kernels.combine.lacks(T=rows.dtype)
    if lack is not None:
        say_reference_computes(lack)
        return reference.combine(rows, places, weights, other)
    config = kernels.combine.fitting(rows.dtype, CHOSEN=chosen)
    assert config is not None, "see `_too_many`"
    y = rows.new_empty(tokens, channels)
    other_rows = y if other is None else rows_of(other)  # the stand-in for None is not read
    kernels.combine.launch(
        (tokens, -(-channels // config["BLOCK"])),
        config,
        rows=rows_of(rows),
        other=other_rows,
        places=places,
        weights=weights,
        y=y,
        channels=channels,
        other_row=other_rows.stride(0),
        chosen=chosen,
        has_other=int(other is not None),
    )
    return y


BACKEND = ExpertsBackend(triton.NAME, triton.takes, choose_experts, sort_by_expert, combine)
