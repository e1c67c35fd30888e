"""Log-probs of tokens, a few rows at a time, so that the logits of a long prompt never exist all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.engine.result import Score
from megatron_ext.memory.budget import SCORING_BYTES
from megatron_ext.ops.sampling.log_probs import log_probs_of

# Bytes per logit of a row, at most: the output layer's logits, their copy in fp32, and its log-softmax.
_BYTES_PER_LOGIT = 12


def rows_at_once(vocabulary: int) -> int:
    """Return the number of rows of logits that are scored together, within `SCORING_BYTES`."""
    return max(1, SCORING_BYTES // (_BYTES_PER_LOGIT * vocabulary))


def score_rows(
    logits_of: Callable[[slice], Tensor],
    vocabulary: int,
    targets: Tensor,
    top_n: Sequence[int],
    keep: Callable[[Tensor], None] | None = None,
) -> tuple[Score, ...]:
    """Score k tokens; a row's scores depend on that row alone.

    Results reach the host in one read-back per kind, after everything is enqueued.

    Args:
        logits_of: Returns the logits [j - i, V] of rows [i, j) of the k rows.
        vocabulary: V.
        targets: Token ids, [k] int64.
        top_n: Number of best tokens to list for each row, k numbers.
        keep: Receives the log-probs [k], on the device; None keeps none.
    """
    max_n, at_once = min(max(top_n, default=0), vocabulary), rows_at_once(vocabulary)
    parts = []
    for start in range(0, len(targets), at_once):
        rows = slice(start, start + at_once)
        parts.append(log_probs_of(logits_of(rows), targets[rows], max_n))
    if not parts:
        return ()
    log_probs = torch.cat([part.chosen for part in parts])
    if keep is not None:
        keep(log_probs)
    chosen = log_probs.tolist()
    best = torch.cat([part.best for part in parts]).tolist()
    listed = torch.cat([part.listed for part in parts]).tolist()
    return tuple(
        Score(log_prob, dict(zip(row_ids[:n], row_values[:n], strict=True)))
        for log_prob, row_ids, row_values, n in zip(chosen, best, listed, top_n, strict=True)
    )
