"""Log-probs of tokens and of the best tokens of a row, raw or after the filters of sampling.

Shapes are static where options are on the device only, so the code is suitable for a CUDA graph.

Letters: r rows, V words, n tokens that are listed for each row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.ops.sampling.reference import best_tokens, sort_rows
from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata


class LogProbs(NamedTuple):
    """Log-probs of r rows.

    Attributes:
        chosen: [r] fp32, log-probs of the requested tokens.
        best: [r, n] int64, the best tokens, best first; of equal ones the smaller id.
        listed: [r, n] fp32, log-probs of the best tokens.
    """

    chosen: Tensor
    best: Tensor
    listed: Tensor


def log_probs_of(logits: Tensor, tokens: Tensor, listed: int) -> LogProbs:
    """Return log-probs of tokens given the logits; a row's log-probs depend on that row alone.

    Args:
        logits: [r, V] of any type.
        tokens: [r] int64.
        listed: n, at most V.
    """
    log_probs = logits.float().log_softmax(-1)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    best = best_tokens(log_probs, listed) if listed else tokens.new_empty(len(tokens), 0)
    return LogProbs(chosen, best, log_probs.gather(1, best))


def filtered_logits(logits: Tensor, metadata: SamplingMetadata, tokens: Tensor) -> Tensor:
    """Return logits of the distributions that tokens were drawn from, up to a constant of each row: [r, V] fp32.

    They are divided by the temperature, and -inf for tokens that `top_k` and `top_p` drop. Backends of sampling may
    differ in a token at the border, so all tokens that are not worse than the drawn one are kept, too.

    Args:
        logits: [r, V] of any type.
        metadata: Sampling options of the rows.
        tokens: The drawn tokens, [r] int64.
    """
    values = logits.float()
    values = ((values - values.amax(-1, keepdim=True)).double() / metadata.temperature[:, None]).float()
    if not metadata.may_filter:
        return values
    ids, _, is_kept = sort_rows(logits, metadata)
    rank = (ids == tokens[:, None]).int().argmax(-1, keepdim=True)
    is_kept |= torch.arange(ids.shape[1], device=ids.device) <= rank
    return values.masked_fill(~torch.empty_like(is_kept).scatter_(1, ids, is_kept), -torch.inf)
