"""Sampling in C++, for CPUs: each row separately, with the kernel in `kernels.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.sampling.reference import SamplingBackend
from megatron_ext.ops.sampling.sampling_metadata import SamplingBatch


def sample_tokens(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """See the operator."""
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.uniform)
    return cpp.kernels().sample(logits, *map(torch.from_numpy, columns))


BACKEND = SamplingBackend(cpp.NAME, cpp.takes, sample_tokens)
