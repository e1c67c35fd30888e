"""Megatron's parallel linear layers, with an inference forward of only the product and its collectives.

Upstream's forward always goes through autograd functions, group look-ups and region mappings, which take as long as the
product itself in decode steps of few tokens. Parameters, names, checkpoints and training are upstream's. The weight may
be packed, see `ops.linear`.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from torch import Tensor

from megatron_ext.ops.linear import Packable


class ColumnLinear(Packable, ColumnParallelLinear):
    """`ColumnParallelLinear`: each rank has some of the outputs."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute [..., inputs] -> [..., outputs of this rank, or of all if gathered], and the bias if it is not added.

        Args:
            input_: Input, equal on every rank.
            weight: Replaces the layer's own weight.
            runtime_gather_output: Replaces the constructor's setting.
        """
        is_missing = weight is None and self.weight is None
        if is_missing or not torch.is_inference_mode_enabled() or self.sequence_parallel:
            self.unpack()
            return super().forward(input_, weight, runtime_gather_output)
        output = self.product(input_, None if self.skip_bias_add else self.bias, weight)
        is_gathered = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if is_gathered and self.tp_group.size() > 1:
            output = gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class RowLinear(Packable, RowParallelLinear):
    """`RowParallelLinear`: each rank has some of the inputs, and their products are summed."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute [..., inputs of this rank, or of all] -> [..., outputs], and the bias if it is not added."""
        if not torch.is_inference_mode_enabled() or self.sequence_parallel:
            self.unpack()
            return super().forward(input_)
        is_parallel = self.tp_group.size() > 1
        if is_parallel and not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        output = self.product(input_)
        if is_parallel and not self.explicit_expert_comm:  # else the token dispatcher sums
            torch.distributed.all_reduce(output, group=self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output.add_(self.bias), None
