"""Forms of answers in fixed places: a mask for each row, behind the other things that are done to its logits.

Only steps in which somebody must keep to a form send them. A row without a form may have every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from megatron_ext.mcore.fixed_places import Layout
from megatron_ext.mcore.guides import Guides
from megatron_ext.mcore.staging import SamplingRow
from megatron_ext.scheduling.step import Sampling, ScheduledChunk

_BITS: Final = 64  # of the numbers that are sent; those of masks have half as many
_EVERY_TOKEN: Final = -1  # all bits of a number


def wants_form(sampling: Sampling) -> bool:
    """Whether the token is one of an answer that must have a form."""
    return sampling.shaping is not None and sampling.shaping.form is not None


def with_masks(layout: Layout, rows: int, vocabulary: int) -> Layout:
    """A layout, and behind it the masks of its rows."""
    return Layout({**layout.shapes, "masks": (rows, -(-vocabulary // _BITS))}, layout.fractions)


def write_masks(chunks: Sequence[ScheduledChunk], guides: Guides, masks: np.ndarray | None) -> dict[int, str]:
    """Fill the masks, and forget what guided answers that are none of this step's.

    Args:
        chunks: One a row.
        guides: Of answers that must have a form.
        masks: [R, ceil(V / 64)] int64; None where no row has a form.

    Returns:
        Requests whose form cannot be followed, and why; their rows may have every token.
    """
    asking = [(row, chunk) for row, chunk in enumerate(chunks) if chunk.sampling is not None]
    rows = [SamplingRow(chunk.request_id, chunk.sampling) for _, chunk in asking if chunk.sampling is not None]
    failures: dict[int, str] = {}
    guides.keep(rows)
    if masks is None:
        return failures
    guided, found, hopeless = guides.masks(rows, failures)
    assert not hopeless, "there are no drafts here"
    masks[:] = _EVERY_TOKEN
    if guided:
        numbers = masks.view(np.int32)
        width = min(numbers.shape[1], found.shape[1])  # the library's may have a number more, or ours
        numbers[[asking[i][0] for i in guided], :width] = found[:, :width].numpy()
    return failures


def masks_of(parts: Mapping[str, Tensor]) -> Tensor:
    """What the device finds of them: [R, W] int32, see `ops.sampling.shaping.keep_allowed`."""
    return parts["masks"].view(torch.int32)
