"""Linear layers in plain torch, on any device: the weight stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.ops.backends import anything
from megatron_ext.ops.linear.packed import PackedWeight


@dataclass(frozen=True)
class LinearBackend:
    """Backend of linear layers.

    Attributes:
        name: Unique among the operator's backends.
        takes: Returns whether the backend is to compute with a weight [o, i].
        pack: Function from a weight [o, i] to the packed one; None if `F.linear` computes with the weight itself.
    """

    name: str
    takes: Callable[[Tensor], bool]
    pack: Callable[[Tensor], PackedWeight] | None


BACKEND = LinearBackend("reference", anything, None)
