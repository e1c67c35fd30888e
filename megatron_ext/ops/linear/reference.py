"""Linear layers in plain torch, on any device: the weight stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.ops.backends import Backend, anything
from megatron_ext.ops.linear.packed import PackedWeight


@dataclass(frozen=True)
class LinearBackend(Backend):
    """Backend of linear layers.

    Attributes:
        pack: Function from a weight [o, i] to the packed one; None if `F.linear` computes with the weight itself.
    """

    pack: Callable[[Tensor], PackedWeight] | None


BACKEND = LinearBackend("reference", anything, None)
