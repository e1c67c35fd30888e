"""Linear layers in C++ with weights of 16 bits or int8, which stay so in memory, on CPUs; kernels are in `kernels.cpp`.

Weights of int8 are quantized here: symmetric, with a scale in fp32 for each output and group of 128 inputs. That is an
approximation, so it is a backend of its own, which no table chooses.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.ops import cpp
from megatron_ext.ops.linear import table
from megatron_ext.ops.linear.reference import LinearBackend

DTYPES: Final = (torch.bfloat16, torch.float16)
INT8_NAME: Final = "int8"
_LARGEST: Final = 127
_PANELS_AT_ONCE: Final = 32  # quantized in fp32, which needs memory


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
        self._outputs = weight.shape[0]
        with torch.inference_mode(mode=False), torch.no_grad():
            self._panels, self._scales = self._packed(weight.detach())
        cpp.move_to_large_pages(self._panels)
        self._product = cpp.kernels().linear

    def _packed(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the weight in panels, and their scales if they have any."""
        return panels_of(weight), None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product [..., o] of x [..., i]; without gradients."""
        return self._product(x, self._panels, self._scales, self._outputs, bias)

    def dense(self) -> Tensor:
        """Return a copy of the original weight [o, i]."""
        with torch.inference_mode(mode=False), torch.no_grad():
            whole = self._panels.transpose(1, 2).flatten(0, 1)[: self._outputs]
            return whole.clone(memory_format=torch.contiguous_format)


class Int8Weight(PanelWeight):
    """Weight in int8, in panels of outputs: a number times the scale of its output and group of inputs.

    Args:
        weight: [o, i], of any floating-point type; it is not kept.
    """

    def _packed(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        size, group = int(cpp.kernels().linear_panel()), int(cpp.kernels().linear_block())
        outputs, inputs = weight.shape
        count, groups = -(-outputs // size), -(-inputs // group)
        panels, scaled = torch.empty(count, inputs, size, dtype=torch.int8), torch.empty(count, groups, size)
        for first in range(0, count, _PANELS_AT_ONCE):
            here = slice(first, first + _PANELS_AT_ONCE)
            rows = weight[first * size : here.stop * size].float()
            rows = F.pad(rows, (0, -inputs % group, 0, -rows.shape[0] % size))
            rows = rows.view(-1, size, groups, group)
            scales = rows.abs().amax(-1) / _LARGEST
            divisors = torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
            numbers = (rows / divisors).round_().clamp_(-_LARGEST, _LARGEST).flatten(2)[..., :inputs]
            panels[here].copy_(numbers.transpose(1, 2))
            scaled[here].copy_(scales.transpose(1, 2))
        return panels, scaled

    def dense(self) -> Tensor:
        """Refuse: the original weight is gone.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "the weights of linear layers are quantized to int8, and the originals were not kept: to save, export or "
            "train them, load the model without --cpu-weight-quantization int8"
        )


BACKEND = LinearBackend(cpp.NAME, takes, PanelWeight)
INT8 = LinearBackend(INT8_NAME, lambda weight: False, Int8Weight)
