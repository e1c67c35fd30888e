"""Sampling in Triton, for CUDA devices: all rows in one launch without sorting, with the kernel in `kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import FunctionBackend, NoKernelError
from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata
from megatron_ext.ops.triton.launching import rows_of

MAX_WORDS = 1 << 22
"""Largest vocabulary: the sum of this many masses does not overflow."""
PROGRAMS = 128
"""Maximum number of programs of a launch, each with a row of scratch: as many as devices have multiprocessors, nearly,
since a program takes half of one's threads or more."""
ALIGNMENT = 16
"""Rows of scratch lie a multiple of this many elements apart."""


def sample_tokens(logits: Tensor, metadata: SamplingMetadata, _: int | None = None) -> Tensor:
    """Draw tokens as the operator does."""
    from megatron_ext.ops.sampling import kernels

    if not 0 < logits.shape[1] <= MAX_WORDS:
        raise NoKernelError(f"sampling has no kernel for {logits.shape[1]} words, but for 1 to {MAX_WORDS}")
    kernels.draw_rows.require(T=logits.dtype)
    logits, words = rows_of(logits), logits.shape[1]
    programs, width = min(PROGRAMS, len(logits)), -(-words // ALIGNMENT) * ALIGNMENT
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    fractions = {name: getattr(metadata, name).contiguous() for name in ("temperature", "top_p", "uniform")}
    kernels.draw_rows.launch(
        (programs,),
        kernels.draw_rows.config_for(logits.dtype),
        logits=logits,
        scratch=logits.new_empty(programs, width),
        top_k=metadata.top_k.contiguous(),
        tokens=tokens,
        row_stride=logits.stride(0),
        rows=len(logits),
        words=words,
        **{name: column.view(torch.int64) for name, column in fractions.items()},
    )
    return tokens


BACKEND = FunctionBackend(triton.NAME, triton.takes, sample_tokens)
