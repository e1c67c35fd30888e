"""Mamba-1 mixer with varlen prefill and decode, on any device.

Gu & Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), figure 3: in_proj -> [x | z]; a
causal convolution over x; x_proj -> [dt | B | C]; dt_proj and softplus make a step size for every channel; the
selective scan; a gate, y * SiLU(z); out_proj. Parameter names, shapes and orders match the authors' `Mamba`.

Descendants normalize dt, B and C before they are used: FalconMamba without weights, Jamba with weights of their own
(`dt_layernorm`, `b_layernorm`, `c_layernorm`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.mixers.mixer import MixerSubmodules, Pass, Projected, RecurrentMixer, mark_split, random_step_bias
from megatron_ext.ops.gated_norm import RowNorm, rms_norm, silu_gate
from megatron_ext.ops.linear import PackableLinear
from megatron_ext.ops.selective_scan import SELECTIVE_SCAN
from megatron_ext.ops.step_size import step_sizes


class Mamba1Mixer(RecurrentMixer):
    """Mamba-1 layer, see the module.

    Shapes are per tensor-parallel rank: D channels of d_inner, R the rank of dt, N states a channel.

    Args:
        config: Reads mamba_state_dim (N).
        submodules: Specs of `in_proj` and `out_proj`.
        d_model: Hidden size.
        d_inner: Channels of all ranks.
        dt_rank: R.
        d_conv: Convolution window K.
        inner_norm: Norm of dt, B and C: "none", "plain" (RMS without weights) or "weighted".
        inner_norm_epsilon: Added to the variance in these norms.
        chunk_size: See `RecurrentMixer`, also `placing`.
    """

    replicated = ("dt_layernorm.", "b_layernorm.", "c_layernorm.")
    columns = ("x_proj.weight",)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        d_model: int,
        *,
        d_inner: int | None = None,
        dt_rank: int | None = None,
        d_conv: int = ModelConfig.mamba_conv_kernel,
        inner_norm: str = "none",
        inner_norm_epsilon: float = 1e-6,
        chunk_size: int = ModelConfig.mamba_chunk_size,
        **placing: object,
    ) -> None:
        super().__init__(config, d_conv, chunk_size, **placing)  # type: ignore[arg-type]  # as megatron-core gives them
        self.d_state = config.mamba_state_dim
        self.dt_rank = dt_rank or math.ceil(d_model / 16)
        d_inner = d_inner or 2 * d_model
        assert d_inner % self.tp_group.size() == 0, (d_inner, self.tp_group.size())
        self.d_inner_local = d_inner // self.tp_group.size()
        self.state_shape = (self.d_inner_local, self.d_state)
        self.build_projections(submodules, d_model, 2 * d_inner, d_inner)
        self._build_recurrence(inner_norm, inner_norm_epsilon)

    def _build_recurrence(self, inner_norm: str, epsilon: float) -> None:
        """Build convolution, projections to dt, B and C, A and D, initialised as the authors do (A, D in fp32)."""
        dtype, channels, states = self.config.params_dtype, self.d_inner_local, self.d_state
        self.conv1d = nn.Conv1d(channels, channels, self.d_conv, groups=channels, dtype=dtype)
        self.x_proj = PackableLinear(channels, self.dt_rank + 2 * states, bias=False, dtype=dtype)
        self.dt_proj = PackableLinear(self.dt_rank, channels, dtype=dtype)
        with torch.no_grad():
            nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
            self.dt_proj.bias.copy_(random_step_bias(channels))
        self.A_log = nn.Parameter(torch.arange(1, states + 1, dtype=torch.float32).log().repeat(channels, 1))
        self.D = nn.Parameter(torch.ones(channels, dtype=torch.float32))
        split = (*self.conv1d.parameters(), *self.x_proj.parameters(), *self.dt_proj.parameters(), self.A_log, self.D)
        mark_split(split)
        widths = {"dt_layernorm": self.dt_rank, "b_layernorm": states, "c_layernorm": states}
        for name, width in widths.items():
            setattr(self, name, _inner_norm(inner_norm, width, epsilon, dtype))

    def split(self, projected: Tensor) -> Projected:
        """Split [T, .] into x and z, [T, D] each; views."""
        x, z = projected.split(self.d_inner_local, dim=-1)
        return Projected(x, (), z)

    def mix(self, conv_inputs: Tensor, scan_inputs: tuple[Tensor, ...], through: Pass) -> Tensor:
        """Apply convolution and selective scan: x [T, D] -> y [T, D]."""
        x = through.convolve(conv_inputs, self.conv1d.weight, self.conv1d.bias)
        dt, b, c = self._selected(x)
        dt, A = step_sizes(dt, self.dt_proj.bias, self.A_log)
        return through.scan(SELECTIVE_SCAN, x, dt, A, b, c, D=self.D.float())

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return y * SiLU(z), in z's type."""
        return silu_gate(y, gate)

    def _selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [T, D] to the scan's inputs of each token: dt before its bias [T, D], B [T, N] and C [T, N]."""
        projected, is_parallel = self.x_proj(x), self.tp_group.size() > 1
        if is_parallel:
            projected = reduce_from_tensor_model_parallel_region(projected, self.tp_group)
        dt, b, c = projected.split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        if is_parallel:
            dt, b, c = (copy_to_tensor_model_parallel_region(t, self.tp_group) for t in (dt, b, c))
        return self.dt_proj.product(dt), b, c

    def sections(self) -> Mapping[str, Mapping[str, int]]:
        """Return the rows of each part: x and z are separate tensors in checkpoints."""
        return {"in_proj.weight": {"x": self.d_inner_local, "z": self.d_inner_local}}


class InnerNorm(nn.Module):
    """RMS norm of dt, B or C, in fp32; a norm without weights has None as `weight`."""

    weight: nn.Parameter | None

    def __init__(self, width: int, epsilon: float, weight: nn.Parameter | None) -> None:
        super().__init__()
        self.width = width
        self.epsilon = epsilon
        self.register_parameter("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [T, width] -> [T, width] in x's type."""
        return rms_norm(x, RowNorm(self.weight, self.epsilon), self._normed)

    def _normed(self, x: Tensor) -> Tensor:
        """Normalize in plain torch; differentiable."""
        weight = None if self.weight is None else self.weight.float()
        return F.rms_norm(x.float(), (self.width,), weight, self.epsilon).to(x.dtype)


def _inner_norm(kind: str, width: int, epsilon: float, dtype: torch.dtype) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    assert kind in ("plain", "weighted"), kind
    return InnerNorm(width, epsilon, nn.Parameter(torch.ones(width, dtype=dtype)) if kind == "weighted" else None)
