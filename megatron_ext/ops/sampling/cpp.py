"""Sampling in C++, for CPUs: each row separately, with the kernel in `kernels.cpp`."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.sampling.sampling_metadata import SamplingBackend, SamplingMetadata


def sample_tokens(logits: Tensor, metadata: SamplingMetadata, _: int | None = None) -> Tensor:
    columns = metadata.temperature, metadata.top_k, metadata.top_p, metadata.uniform
    return cpp.kernels().sample(logits, *columns)


BACKEND = SamplingBackend(cpp.NAME, cpp.takes, sample_tokens)
