"""Mamba-2 mixer with varlen prefill and decode, on any device.

Dao & Gu, "Transformers are SSMs" (2024), figure 6: in_proj -> [z | x | B | C | dt]; a causal convolution over
[x | B | C]; the SSD scan; a gated group norm; out_proj. Parameter names, shapes and the order inside `in_proj` are
the same as in megatron-core's `MambaMixer`, so checkpoints fit both.

Descendants multiply the parts of the projection by constants, norm before they gate, or do not norm (FalconH1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.config.model_fields import GATE_FIRST
from megatron_ext.mixers.mixer import MixerSubmodules, Pass, Projected, RecurrentMixer, mark_split, random_step_bias
from megatron_ext.ops.gated_norm import RowNorm, gated_norm, norm_then_gate, silu_gate
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.step_size import step_sizes

A_INIT_RANGE = (1.0, 16.0)


class Mamba2Mixer(RecurrentMixer):
    """Mamba-2 layer, see the module. Shapes are per tensor-parallel rank; d_inner = H * P, Cn = d_inner + 2 * G * N.

    Args:
        config: Reads mamba_state_dim (N), mamba_head_dim (P), mamba_num_heads (H), mamba_num_groups (G).
        submodules: Specs of `in_proj` and `out_proj`.
        d_model: Hidden size.
        d_conv: Convolution window K.
        gated_norm: "gate_first", "norm_first", or None for a gate alone.
        multipliers: Factors of z, x, B, C and dt; None for 1.
        chunk_size: See `RecurrentMixer`, also `placing`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        d_model: int,
        *,
        d_conv: int = ModelConfig.mamba_conv_kernel,
        gated_norm: str | None = GATE_FIRST,
        multipliers: Sequence[float] | None = None,
        chunk_size: int = ModelConfig.mamba_chunk_size,
        **placing: object,
    ) -> None:
        super().__init__(config, d_conv, chunk_size, **placing)  # type: ignore[arg-type]  # as megatron-core gives them
        self.headdim = config.mamba_head_dim
        self.d_state = config.mamba_state_dim
        nheads = config.mamba_num_heads or 2 * d_model // self.headdim
        tp_size = self.tp_group.size()
        assert nheads % tp_size == 0, (nheads, tp_size)
        assert config.mamba_num_groups % tp_size == 0, (config.mamba_num_groups, tp_size)
        self.nheads_local = nheads // tp_size
        self.ngroups_local = config.mamba_num_groups // tp_size
        self.d_inner_local = self.nheads_local * self.headdim
        self.conv_dim = self.d_inner_local + 2 * self.ngroups_local * self.d_state
        self.state_shape = (self.nheads_local, self.headdim, self.d_state)
        d_inner = nheads * self.headdim
        d_projected = 2 * d_inner + 2 * config.mamba_num_groups * self.d_state + nheads
        self.build_projections(submodules, d_model, d_projected, d_inner)
        self._build_recurrence(gated_norm)
        self.register_buffer("multipliers", self._by_row(multipliers), persistent=False)

    def _build_recurrence(self, gated_norm: str | None) -> None:
        """Build convolution, dt bias, A, D and the gated norm, initialised as `MambaMixer` does (A, D in fp32)."""
        dtype, heads = self.config.params_dtype, self.nheads_local
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, self.d_conv, groups=self.conv_dim, dtype=dtype)
        self.dt_bias = nn.Parameter(random_step_bias(heads).to(dtype))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32).uniform_(*A_INIT_RANGE).log())
        self.D = nn.Parameter(torch.ones(heads, dtype=torch.float32))
        channels, group_size = self.d_inner_local, self.d_inner_local // self.ngroups_local
        kind = GatedGroupRMSNorm if gated_norm == GATE_FIRST else GroupRMSNormThenGate
        self.norm = None if gated_norm is None else kind(channels, group_size, self.config.layernorm_epsilon, dtype)
        norm = [] if self.norm is None else [self.norm.weight]
        mark_split((*self.conv1d.parameters(), self.dt_bias, self.A_log, self.D, *norm))

    def _by_row(self, multipliers: Sequence[float] | None) -> Tensor | None:
        """Return the multipliers of z, x, B, C and dt for each row of this rank's projection."""
        if multipliers is None:
            return None
        inner, grouped = self.d_inner_local, self.ngroups_local * self.d_state
        rows = torch.tensor((inner, inner, grouped, grouped, self.nheads_local))
        return torch.tensor(multipliers, dtype=self.config.params_dtype).repeat_interleave(rows)

    def split(self, projected: Tensor) -> Projected:
        """Split [T, .] into xBC [T, Cn], dt [T, H], z [T, d_inner]; views."""
        if self.multipliers is not None:
            projected = projected * self.multipliers
        z, xbc, dt = projected.split([self.d_inner_local, self.conv_dim, self.nheads_local], dim=-1)
        return Projected(xbc, (dt,), z)

    def mix(self, conv_inputs: Tensor, scan_inputs: tuple[Tensor, ...], through: Pass) -> Tensor:
        """Apply convolution and SSD: xBC [T, Cn], dt [T, H] -> y [T, d_inner]."""
        x, b, c = self._split_heads(through.convolve(conv_inputs, self.conv1d.weight, self.conv1d.bias))
        (dt,) = scan_inputs
        dt, A = step_sizes(dt, self.dt_bias, self.A_log)
        return through.scan(SSD, x, dt, A, b, c, D=self.D.float()).flatten(1)

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Apply the gated norm, or the gate alone."""
        return silu_gate(y, gate) if self.norm is None else self.norm(y, gate)

    def _split_heads(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [T, Cn] into x [T, H, P], B [T, G, N], C [T, G, N]; views."""
        group_channels = self.ngroups_local * self.d_state
        x, b, c = xbc.split([self.d_inner_local, group_channels, group_channels], dim=-1)
        groups = (self.ngroups_local, self.d_state)
        return x.unflatten(-1, (self.nheads_local, self.headdim)), b.unflatten(-1, groups), c.unflatten(-1, groups)

    def sections(self) -> Mapping[str, Mapping[str, int]]:
        """Return the rows of each part, with the names of megatron-core's `MambaMixer`."""
        group_channels = self.ngroups_local * self.d_state
        xbc = {"x": self.d_inner_local, "B": group_channels, "C": group_channels}
        return {
            "in_proj.weight": {"z": self.d_inner_local, **xbc, "dt": self.nheads_local},
            "conv1d.weight": xbc,
            "conv1d.bias": xbc,
        }


class GatedGroupRMSNorm(nn.Module):
    """RMSNorm over groups of channels of y * silu(z) (gate before norm), computed in fp32."""

    def __init__(self, channels: int, group_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.group_size = group_size
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, dtype=dtype))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Gate and normalize: y, z [T, channels] -> [T, channels] in z's type."""
        return gated_norm(y, z, self.weight, group_size=self.group_size, eps=self.eps)


class GroupRMSNormThenGate(GatedGroupRMSNorm):
    """RMSNorm over groups of channels of y, times silu(z) (norm before gate), computed in fp32."""

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalize and gate: y, z [T, channels] -> [T, channels] in z's type."""
        return norm_then_gate(y, z, RowNorm(self.weight, self.eps), self._normed, group_size=self.group_size)

    def _normed(self, y: Tensor) -> Tensor:
        """Normalize in plain torch; differentiable."""
        grouped = y.float().unflatten(-1, (-1, self.group_size))
        return F.rms_norm(grouped, (self.group_size,), eps=self.eps).flatten(-2) * self.weight.float()
