"""Drawing tokens where the device has what rows ask for: every row the same way, no shape from what is asked.

Fit for a CUDA graph: steps are the same program. Backends that have no way of their own order all rows, whatever these
keep. Letters: R rows, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops.sampling import SAMPLING
from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata
from megatron_ext.ops.sampling.sorted_sampling import draw_sorted


def best_tokens_of(logits: Tensor) -> Tensor:
    """The first of the greatest logits of each row, as greedy requests ask for it: [R, V] -> [R]."""
    return logits.max(-1).indices


def draw_tokens(logits: Tensor, metadata: SamplingMetadata, together: int | None = None) -> Tensor:
    """As `sample_tokens`, greedy rows included: [R, V] -> [R]. Rows of NaN give some token.

    Args:
        logits: [R, V].
        wishes: Of the rows.
        together: So many rows are ordered at once where no kernel draws them, which takes memory; None is all.
    """
    draw = SAMPLING.choose(logits).draw
    drawn = None if draw is None else draw(logits, metadata)
    if drawn is not None:
        return drawn
    if together is None or together >= len(logits):
        return draw_sorted(logits, metadata)
    pieces = [slice(start, start + together) for start in range(0, len(logits), together)]
    return torch.cat([draw_sorted(logits[rows], SamplingMetadata(*(one[rows] for one in metadata))) for rows in pieces])
