"""Choosing the next token: one uniform number per request decides."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.sampling import reference

SAMPLING = Backends("sampling", reference.BACKEND)


def sample_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token for each row of logits [R, V]: ids [R] int64; see the reference for the other arguments."""
    return SAMPLING.choose(logits).sample(logits, temperature, top_k, top_p, uniform)


__all__ = ["SAMPLING", "sample_tokens"]
