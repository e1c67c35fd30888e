"""Log-probs of prompt tokens, kept with their KV blocks on the stage that has the output layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogProbPool:
    """Log-probs of the tokens of every block, and what the token after a block is scored from.

    Attributes:
        values: Log-prob of each token of a block, [blocks, B] fp32; undefined for the first token of a sequence.
        hidden_states: Input of the output layer at the last token of a block, [blocks, h].
    """

    values: Tensor
    hidden_states: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """All memory of the pool; each tensor has a row for each block."""
        return self.values, self.hidden_states


def allocate_log_probs(
    blocks: int, block_size: int, channels: int, dtype: torch.dtype, device: torch.device
) -> LogProbPool:
    """Allocate the log-probs of `blocks` blocks, uninitialised.

    Args:
        blocks: Number of blocks.
        block_size: Tokens of a block.
        channels: Width h of the output layer's input.
        dtype: Type of hidden states.
        device: Device of the pool.
    """
    values = torch.empty((blocks, block_size), dtype=torch.float32, device=device)
    return LogProbPool(values, torch.empty((blocks, channels), dtype=dtype, device=device))
