"""Sampling in Triton, for CUDA devices: all rows in one launch without sorting, with the kernel in `kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.sampling.sampling_metadata import SamplingBackend, SamplingMetadata
from megatron_ext.ops.triton.kernel_registry import TYPE_NAMES
from megatron_ext.ops.triton.launching import rows_of, say_reference_computes

MAX_WORDS = 1 << 22
"""Largest vocabulary: the sum of this many masses does not overflow."""
PROGRAMS = 128
"""Maximum number of programs of a launch, each with a row of scratch: as many as devices have multiprocessors, nearly,
since a program takes half of one's threads or more."""
ALIGNMENT = 16
"""Rows of scratch lie a multiple of this many elements apart."""


def _lacks(logits: Tensor) -> str | None:
    """Return why there is no kernel for these logits; None if there is one."""
    from megatron_ext.ops.sampling import kernels

    if not 0 < logits.shape[1] <= MAX_WORDS:
        return f"sampling has no kernel for {logits.shape[1]} words, but for 1 to {MAX_WORDS}"
    return kernels.draw_rows.lacks(T=logits.dtype)


def sample_tokens(logits: Tensor, metadata: SamplingMetadata, _: int | None = None) -> Tensor | None:
    """Draw tokens as the operator does; return None for logits without a kernel."""
    lack = _lacks(logits)
    if lack is not None:
        say_reference_computes(lack)
        return None
    from megatron_ext.ops.sampling import kernels

    logits, words = rows_of(logits), logits.shape[1]
    programs, width = min(PROGRAMS, len(logits)), -(-words // ALIGNMENT) * ALIGNMENT
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    config = next(one for one in kernels.draw_rows.configs if one.suits({"T": TYPE_NAMES[logits.dtype]}))
    fractions = {name: getattr(metadata, name).contiguous() for name in ("temperature", "top_p", "uniform")}
    kernels.draw_rows.launch(
        (programs,),
        config,
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


BACKEND = SamplingBackend(triton.NAME, triton.takes, sample_tokens)
