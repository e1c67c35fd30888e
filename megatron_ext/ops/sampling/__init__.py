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
sample_tokens = SAMPLING(reference.sample_tokens)

__all__ = ["SAMPLING", "SamplingMetadata", "greedy_tokens", "sample_tokens", "sampling_metadata"]
