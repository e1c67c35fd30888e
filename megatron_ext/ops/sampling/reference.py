"""Sampling in plain torch, on any device; all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.ops.backends import anything


@dataclass(frozen=True)
class SamplingBackend:
    """One way to draw tokens; `sample` has the signature of `sample_tokens`."""

    name: str
    takes: Callable[[Tensor], bool]
    sample: Callable[..., Tensor]


def sample_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token for each row by inverting its distribution function at `uniform`.

    Tokens are ordered by probability; the `top_k` best stay, then the fewest whose renormalised mass reaches `top_p`.
    A row's token depends on nothing but that row, so a request is sampled alike alone and in any batch.

    Args:
        logits: [R, V].
        temperature: [R], positive.
        top_k: [R] int64, 0 is off.
        top_p: [R], 0 is off.
        uniform: [R] float64 in [0, 1), one draw of each request's own generator.

    Returns:
        Token ids [R] int64.
    """
    vocabulary = logits.shape[-1]
    ordered, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    # The best logit becomes 0 before the division, so that no temperature overflows; nor may it round to 0 or infinity.
    limits = torch.finfo(torch.float32)
    divisor = temperature.double().clamp(limits.tiny, limits.max).float()
    mass = ((ordered - ordered[:, :1]) / divisor[:, None]).softmax(-1).double()
    rank = torch.arange(vocabulary, device=logits.device)
    mass = mass * (rank < top_k.where(top_k > 0, vocabulary)[:, None])
    mass = mass / mass.sum(-1, keepdim=True)
    mass_before = mass.cumsum(-1) - mass
    mass = mass * (mass_before < top_p.double().where(top_p > 0, 2.0)[:, None])
    reached = mass.cumsum(-1)
    choice = torch.searchsorted(reached, uniform[:, None] * reached[:, -1:], right=True)
    last = (mass > 0).sum(-1, keepdim=True) - 1  # a draw next to 1 must not leave the kept tokens
    return tokens.gather(1, choice.minimum(last)).squeeze(1)


BACKEND = SamplingBackend("reference", anything, sample_tokens)
