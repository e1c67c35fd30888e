"""Interface of packed weights."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class PackedWeight(Protocol):
    """Weight of a linear layer in the layout of a backend; never changed."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product: [..., i] -> [..., o]; without gradients."""

    def dense(self) -> Tensor:
        """Return the weight in a new tensor [o, i], equal to the original to the bit.

        Raises:
            ConfigError: The original cannot be restored from a quantized weight.
        """
