"""Triton kernels around the grouped products of an MoE layer's experts.

Letters: T tokens, E experts, k experts of a token, h channels. Everything but sums of channels is exact or of one row,
so a token's result does not depend on the others.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.experts import Scores, SortedTokens
from megatron_ext.ops.triton.kernel_registry import FLOATS, config, kernel
from megatron_ext.ops.triton.launching import rowed, rows_of

LOWEST = tl.constexpr(-3.0e38)
# See `megatron_ext.ops.experts.Function`.
SOFTMAX_OF_CHOSEN, SOFTMAX_OF_ALL, SIGMOID = (tl.constexpr(number) for number in range(3))
TYPES = [{"T": name} for name in FLOATS]


@kernel(
    pointers={"T": "logits", "fp32": "bias weights", "i32": "ids"},
    counts="experts chosen function has_bias",
    scalars="factor",
    types=TYPES,
    configs=[config(BLOCK=block, CHOSEN=32) for block in (64, 256, 1024)],
)
def choose_experts(
    logits, bias, ids, weights, logits_row, experts, chosen, function, has_bias, factor,
    BLOCK: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Choose a token's experts, one after the other, of equal ones the first: ids and weights [T, k]. The grid is T.

    A NaN is less than any number, so ids are of different experts in any case.
    """
    row = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, BLOCK), tl.arange(0, CHOSEN)
    is_expert = expert < experts
    logit = tl.load(logits + row * logits_row + expert, mask=is_expert, other=float("-inf")).to(tl.float32)
    score = logit
    if function == SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    elif function == SOFTMAX_OF_ALL:
        share = tl.exp(logit - tl.max(logit, 0))
        score = share / tl.sum(share, 0)
    rank = score + tl.load(bias + expert, mask=is_expert & (has_bias != 0), other=0.0)
    rank = tl.where(rank > LOWEST, rank, LOWEST)  # also NaN
    rank = tl.where(is_expert, rank, float("-inf"))
    found, scores = tl.zeros([CHOSEN], tl.int32), tl.full([CHOSEN], float("-inf"), tl.float32)
    for i in range(chosen):
        best = tl.argmax(rank, 0)
        found = tl.where(place == i, best, found)
        scores = tl.where(place == i, tl.sum(tl.where(expert == best, score, 0.0), 0), scores)
        rank = tl.where(expert == best, float("-inf"), rank)
    is_chosen = place < chosen
    weight = tl.where(is_chosen, scores, 0.0)
    if function == SOFTMAX_OF_CHOSEN:
        share = tl.exp(scores - tl.max(scores, 0))
        weight = share / tl.sum(share, 0)
    elif (function == SIGMOID) & (chosen > 1):
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(ids + row * chosen + place, found, mask=is_chosen)
    tl.store(weights + row * chosen + place, weight * factor, mask=is_chosen)


@kernel(
    pointers={"i32": "ids tokens places offsets"},
    counts="pairs chosen",
    configs=[config(BLOCK=4096, num_warps=8)],
)
def sort_by_expert(ids, tokens, places, offsets, pairs, chosen, BLOCK: tl.constexpr):
    """Find the pairs of one expert and their places in sorted order: after all of lower experts. The grid is E.

    Every program counts all pairs, so none waits for another, and the order is always the same.
    """
    expert, place = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        of_pair = tl.load(ids + start + place, mask=start + place < pairs, other=expert)
        before += (of_pair < expert).to(tl.int32)
    first = tl.sum(before, 0)
    for start in range(0, pairs, BLOCK):
        pair = start + place
        is_own = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        target = first + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(places + pair, target, mask=is_own)
        tl.store(tokens + target, pair // chosen, mask=is_own)
        first += tl.sum(is_own.to(tl.int32), 0)
    tl.store(offsets + expert, first)


@kernel(
    pointers={"T": "rows other y", "fp32": "weights", "i32": "places"},
    counts="chosen has_other",
    types=TYPES,
    configs=[config(CHOSEN=chosen, BLOCK=block) for chosen, block in ((8, 512), (32, 128))],
)
def combine(
    rows, other, places, weights, y, channels, other_row, chosen, has_other,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a token's rows times their weights, and a row of `other`. The grid is (T, blocks of channels)."""
    row = tl.program_id(0).to(tl.int64)
    pick, channel = tl.arange(0, CHOSEN), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel, is_pick = channel < channels, pick < chosen
    place = tl.load(places + row * chosen + pick, mask=is_pick, other=0).to(tl.int64)
    weight = tl.load(weights + row * chosen + pick, mask=is_pick, other=0.0)
    is_real = is_pick[:, None] & is_channel[None, :]
    part = tl.load(rows + place[:, None] * channels + channel[None, :], mask=is_real, other=0.0).to(tl.float32)
    own = tl.load(other + row * other_row + channel, mask=is_channel & (has_other != 0), other=0.0).to(tl.float32)
    total = tl.sum(part * weight[:, None], 0) + own
    tl.store(y + row * channels + channel, total.to(y.dtype.element_ty), mask=is_channel)


def _require(experts: int, chosen: int) -> None:
    """Raise `NoKernelError` unless a kernel chooses `chosen` of `experts` experts."""
    largest = choose_experts.configs[-1]
    most, of = largest["CHOSEN"], largest["BLOCK"]
    if experts > of or chosen > most:
        raise NoKernelError(f"no kernel chooses {chosen} of {experts} experts, only {most} of {of}")


def launch_choose_experts(logits: Tensor, bias: Tensor | None, chosen: int, scores: Scores) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    _require(experts, chosen)
    choose_experts.require(T=logits.dtype)
    ids = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    choose_experts.launch(
        (tokens,),
        choose_experts.config_for(logits.dtype, BLOCK=experts),
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


def launch_sort_by_expert(ids: Tensor, experts: int) -> SortedTokens:
    (config,), ids = sort_by_expert.configs, ids.contiguous()
    tokens, places = torch.empty_like(ids).flatten(), torch.empty_like(ids)
    ends = torch.empty(experts, dtype=torch.int32, device=ids.device)
    sort_by_expert.launch(
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


def launch_combine(rows: Tensor, places: Tensor, weights: Tensor, other: Tensor | None) -> Tensor:
    (tokens, chosen), channels = places.shape, rows.shape[1]
    _require(0, chosen)
    combine.require(T=rows.dtype)
    config, y = combine.config_for(rows.dtype, CHOSEN=chosen), rows.new_empty(tokens, channels)
    combine.launch(
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
