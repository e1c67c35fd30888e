"""Live states of recurrent layers: one row per running request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateShape:
    """One sequence's states in all recurrent layers of this rank.

    conv is (Cn, K-1), ssm is (H, P, N); see `Mamba2Mixer.mamba_state_shapes_per_request`.
    """

    layers: int
    conv: tuple[int, ...]
    ssm: tuple[int, ...]
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one sequence's states."""
        conv = torch.Size(self.conv).numel() * self.conv_dtype.itemsize
        return self.layers * (conv + torch.Size(self.ssm).numel() * self.ssm_dtype.itemsize)


class StatePool:
    """States of `rows` sequences; conv [L, rows, Cn, K-1], ssm [L, rows, H, P, N].

    Rows are not cleared between owners: a new owner says that it has no initial state.
    """

    def __init__(self, shape: StateShape, rows: int, device: torch.device) -> None:
        self.shape = shape
        self.conv = torch.empty((shape.layers, rows, *shape.conv), dtype=shape.conv_dtype, device=device)
        self.ssm = torch.empty((shape.layers, rows, *shape.ssm), dtype=shape.ssm_dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """One layer's states, as views: conv [rows, Cn, K-1], ssm [rows, H, P, N]."""
        return self.conv[index], self.ssm[index]
