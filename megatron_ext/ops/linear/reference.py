"""Interface of packed weights, and linear layers in plain torch on any device: the weight stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_ext.ops.backends import Backend


class PackedWeight(Protocol):
    """Weight of a linear layer in the layout of a backend; never changed."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product: [..., i] -> [..., o]; without gradients."""

    def dense(self) -> Tensor:
        """Return the weight in a new tensor [o, i], equal to the original to the bit.

        Raises:
            ConfigError: The original cannot be restored from a quantized weight.
        """


@dataclass(frozen=True)
class LinearBackend(Backend):
    """Backend of linear layers.

    Attributes:
        pack: Function from a weight [o, i] to the packed one; None if `F.linear` computes with the weight itself.
    """

    pack: Callable[[Tensor], PackedWeight] | None


BACKEND = LinearBackend("reference", lambda weight: True, None)
