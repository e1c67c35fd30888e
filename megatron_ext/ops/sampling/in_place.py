"""Drawing tokens where the device has what rows ask for: every row the same way, no shape from what is asked.

Fit for a CUDA graph: steps are the same program. Backends that have no way of their own order all rows, whatever these
keep. Letters: R rows, V words.
"""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.sampling import SAMPLING
from megatron_ext.ops.sampling.ordered import draw_ordered
from megatron_ext.ops.sampling.wishes import Wishes


def best_tokens_of(logits: Tensor) -> Tensor:
    """The first of the greatest logits of each row, as greedy requests ask for it: [R, V] -> [R]."""
    return logits.max(-1).indices


def draw_tokens(logits: Tensor, wishes: Wishes) -> Tensor:
    """As `sample_tokens`, greedy rows included: [R, V] -> [R]. Rows of NaN give some token."""
    draw = SAMPLING.choose(logits).draw
    drawn = None if draw is None else draw(logits, wishes)
    return draw_ordered(logits, wishes) if drawn is None else drawn
