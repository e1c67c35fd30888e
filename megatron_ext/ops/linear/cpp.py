"""Linear layers in C++ with weights of 16 bits, which stay so in memory, on CPUs; the kernels are in `kernels.cpp`."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.linear import table
from megatron_ext.ops.linear.reference import LinearBackend

DTYPES: Final = (torch.bfloat16, torch.float16)


def takes(weight: Tensor) -> bool:
    """Return whether the committed table says that the kernels compute with a weight on this CPU."""
    is_supported = weight.is_cpu and weight.dtype in DTYPES and weight.dim() == 2
    return is_supported and table.packs(weight, cpp.NAME) and cpp.are_used()


def panels_of(weight: Tensor) -> Tensor:
    """Return a weight in panels of p outputs, zeros after the last output: [o, i] -> [o / p, i, p]."""
    size = int(cpp.kernels().linear_panel())
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % size))
    return padded.unflatten(0, (-1, size)).transpose(1, 2).contiguous()


class PanelWeight:
    """Weight of 16 bits in panels of outputs; see `PackedWeight`.

    Args:
        weight: [o, i], bf16 or fp16.
    """

    def __init__(self, weight: Tensor) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self._panels = panels_of(weight.detach())
        self._outputs = weight.shape[0]
        self._product = cpp.kernels().linear

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `PackedWeight`."""
        return self._product(x, self._panels, None, self._outputs, bias)

    def dense(self) -> Tensor:
        """See `PackedWeight`."""
        with torch.inference_mode(mode=False), torch.no_grad():
            return (
                self._panels.transpose(1, 2).flatten(0, 1)[: self._outputs].clone(memory_format=torch.contiguous_format)
            )


BACKEND = LinearBackend(cpp.NAME, takes, PanelWeight)
