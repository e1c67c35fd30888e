"""Log-probs of tokens and of the best tokens of a row. Shapes are static, so the code is suitable for a CUDA graph.

Letters: r rows, V words, n tokens that are listed for each row.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_ext.ops.sampling.top_k_top_p import best_tokens


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
    """Return log-probs of the model's own logits; a row's log-probs depend on that row alone.

    Args:
        logits: [r, V] of any type.
        tokens: [r] int64.
        listed: n, at most V.
    """
    log_probs = logits.float().log_softmax(-1)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    best = best_tokens(log_probs, listed) if listed else tokens.new_empty(len(tokens), 0)
    return LogProbs(chosen, best, log_probs.gather(1, best))
