"""Static buffers for structured output: a token mask for each row, after the other logits processor lists.

Only steps with structured output send them. The mask of any other row allows every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from megatron_ext.runner.cuda_graphs.input_buffers import Layout
from megatron_ext.scheduling.step import Sampling, ScheduledChunk

_BITS: Final = 64  # bits of a number that is sent; numbers of masks have half as many
_EVERY_TOKEN: Final = -1  # all bits of a number set


def needs_structured_output(sampling: Sampling) -> bool:
    """Return whether the row has structured output."""
    return sampling.logits_options is not None and sampling.logits_options.allowed is not None


def with_masks(layout: Layout, rows: int, vocabulary: int) -> Layout:
    """Return a layout extended by the masks of its rows."""
    return Layout({**layout.shapes, "masks": (rows, -(-vocabulary // _BITS))}, layout.fractions)


def write_masks(chunks: Sequence[ScheduledChunk], masks: np.ndarray) -> None:
    """Fill the masks.

    Args:
        chunks: One chunk per row.
        masks: [R, ceil(V / 64)] int64; modified.
    """
    masks[:] = _EVERY_TOKEN
    numbers = masks.view(np.int32)
    for row, sampling in enumerate(chunk.sampling for chunk in chunks):
        if sampling is not None and sampling.logits_options is not None and sampling.logits_options.allowed is not None:
            allowed = np.frombuffer(sampling.logits_options.allowed, np.int32)
            width = min(numbers.shape[1], len(allowed))  # either may have one number more
            numbers[row, :width] = allowed[:width]


def masks_of(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the device's view of the masks: [R, W] int32, see `ops.sampling.logits_processors.keep_allowed`."""
    return parts["masks"].view(torch.int32)
