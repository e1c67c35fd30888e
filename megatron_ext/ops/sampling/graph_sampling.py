"""Sampling with options on the device: every row is computed the same way, and no shape depends on the options.

Steps run the same program, as a CUDA graph needs. Backends without a sampling kernel sort all rows, whatever these
keep. Letters: R rows, V words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops.sampling import SAMPLING
from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata
from megatron_ext.ops.sampling.sorted_sampling import draw_sorted


def best_tokens_of(logits: Tensor) -> Tensor:
    """Return the first maximum of each row's logits, for greedy requests: [R, V] -> [R]."""
    return logits.max(-1).indices


def draw_tokens(logits: Tensor, metadata: SamplingMetadata, together: int | None = None) -> Tensor:
    """Draw tokens as `sample_tokens` does, greedy rows included: [R, V] -> [R]. Rows of NaN yield an arbitrary token.

    Args:
        logits: [R, V].
        metadata: Sampling metadata of the rows.
        together: Rows that are sorted at once if no kernel draws them, to bound memory; None for all.
    """
    draw = SAMPLING.choose(logits).draw
    drawn = None if draw is None else draw(logits, metadata)
    if drawn is not None:
        return drawn
    if together is None or together >= len(logits):
        return draw_sorted(logits, metadata)
    pieces = [slice(start, start + together) for start in range(0, len(logits), together)]
    return torch.cat([draw_sorted(logits[rows], SamplingMetadata(*(one[rows] for one in metadata))) for rows in pieces])
