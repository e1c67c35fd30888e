"""Sampling of the next token, determined by one uniform number per request."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp, triton
from megatron_ext.ops.backends import FunctionBackend, Operator
from megatron_ext.ops.sampling import reference
from megatron_ext.ops.sampling.reference import greedy_tokens
from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata, sampling_metadata


def _sample_in_cpp(logits: Tensor, metadata: SamplingMetadata, _: int | None = None) -> Tensor:
    """Draw each row separately, with the kernel in `kernels.cpp`."""
    columns = metadata.temperature, metadata.top_k, metadata.top_p, metadata.uniform
    return cpp.kernels().sample(logits, *columns)


SAMPLING = Operator(
    "sampling",
    FunctionBackend(cpp.NAME, cpp.takes, {"sample_tokens": _sample_in_cpp}.get),
    triton.backend(__name__),
)


@SAMPLING
def sample_tokens(logits: Tensor, metadata: SamplingMetadata, together: int | None = None) -> Tensor:
    """Draw a token for each row by inverting its distribution function; a greedy row takes its best token.

    Kept are the `top_k` best tokens, and of them the smallest set of best ones whose renormalised mass reaches `top_p`:
    those with less than `top_p` before them. Of equal logits, the one with the smaller id is better. The kept tokens
    are laid on a line in order of their ids, each as long as its mass; the token at `uniform` times the line's length
    is drawn.

    A row's token depends on that row alone, so a request gets the same sample alone and in any batch. Backends draw the
    same token unless `uniform` lies within 1e-5 of a border between two tokens, or `top_p` within 1e-5 of a value at
    which one token more or less would be kept. A row of NaN yields an arbitrary token.

    Args:
        logits: [R, V] of any type; -inf is never drawn.
        metadata: Sampling options of each row; nothing is read back, and no shape depends on them.
        together: Rows that are sorted at once where no kernel draws them, to bound memory; None for all.

    Returns:
        Ids [R] int64.
    """
    return reference.sample_tokens(logits, metadata, together)


__all__ = ["SAMPLING", "SamplingMetadata", "greedy_tokens", "sample_tokens", "sampling_metadata"]
