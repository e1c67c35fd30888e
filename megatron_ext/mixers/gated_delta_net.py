"""Gated delta net mixer with varlen prefill and decode, on any device.

Yang, Kautz & Hatamizadeh, "Gated Delta Networks" (2024), figure 1: in_proj -> [q | k | v | gate | beta | alpha]; a
causal convolution with SiLU over [q | k | v]; q and k divided by their lengths; the gated delta rule with the decay
exp(-exp(A_log) * softplus(alpha + dt_bias)) and the strength sigmoid(beta), or twice that; a norm of each head, times
SiLU of the gate; out_proj. Parameter names, shapes and the order inside `in_proj` match megatron-core's
`GatedDeltaNet`, so checkpoints fit both. SiLU is used in both places whatever the MLPs use, since upstream's kernels
support nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from megatron_ext.config.recurrent import GATED_DELTA_CHUNK
from megatron_ext.mixers.mixer import MixerSubmodules, Pass, Projected, RecurrentMixer, mark_split
from megatron_ext.ops.gated_delta_rule import GATED_DELTA_RULE
from megatron_ext.ops.gated_norm import NamedNorm, norm_then_gate
from megatron_ext.ops.step_size import decays

A_INIT_RANGE = (1.0, 16.0)


class GatedDeltaNetMixer(RecurrentMixer):
    """Gated delta net layer, see the module.

    Shapes are per tensor-parallel rank: G key heads of K channels, H value heads of V channels.

    Args:
        config: Reads linear_num_key_heads (G), linear_key_head_dim (K), linear_num_value_heads (H),
            linear_value_head_dim (V) and linear_conv_kernel_dim.
        submodules: Specs of `in_proj`, `out_norm` and `out_proj`.
        d_model: Hidden size.
        norm_epsilon: Epsilon of the output norm; None for the epsilon of all norms.
        max_strength: Maximum strength with which a token overwrites the state; above 1, eigenvalues can be negative.
        chunk_size: See `RecurrentMixer`, also `placing`.
    """

    replicated = ("out_norm.",)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        d_model: int,
        *,
        norm_epsilon: float | None = None,
        max_strength: float = 1.0,
        chunk_size: int = GATED_DELTA_CHUNK,
        **placing: object,
    ) -> None:
        window = config.linear_conv_kernel_dim
        super().__init__(config, window, chunk_size, **placing)  # type: ignore[arg-type]  # as megatron-core gives them
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        tp_size = self.tp_group.size()
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        assert key_heads % tp_size == 0, (key_heads, tp_size)
        assert value_heads % key_heads == 0, (value_heads, key_heads)
        self.key_heads_local, self.value_heads_local = key_heads // tp_size, value_heads // tp_size
        self.qk_dim_local = self.key_heads_local * self.key_head_dim
        self.v_dim_local = self.value_heads_local * self.value_head_dim
        self.conv_dim = 2 * self.qk_dim_local + self.v_dim_local
        self.state_shape = (self.value_heads_local, self.key_head_dim, self.value_head_dim)
        d_projected = self.conv_dim + self.v_dim_local + 2 * self.value_heads_local
        self.build_projections(submodules, d_model, tp_size * d_projected, tp_size * self.v_dim_local)
        self.max_strength = max_strength
        self._build_recurrence(submodules)
        if norm_epsilon is not None:
            self.out_norm.eps = norm_epsilon

    def _build_recurrence(self, submodules: MixerSubmodules) -> None:
        """Build convolution, dt bias, A and the norm of the heads, initialised as `GatedDeltaNet` does."""
        dtype, heads = self.config.params_dtype, self.value_heads_local
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, self.d_conv, groups=self.conv_dim, bias=False, dtype=dtype
        )
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*A_INIT_RANGE).log().to(dtype))
        mark_split((*self.conv1d.parameters(), self.dt_bias, self.A_log))
        self.out_norm = build_module(submodules.out_norm, config=self.config, hidden_size=self.value_head_dim)

    def split(self, projected: Tensor) -> Projected:
        """Split [T, .] into [q | k | v] [T, Cn], beta and alpha [T, H], gate [T, H * V]; views."""
        heads = self.value_heads_local
        qkv, gate, beta, alpha = projected.split([self.conv_dim, self.v_dim_local, heads, heads], dim=-1)
        return Projected(qkv, (beta, alpha), gate)

    def mix(self, conv_inputs: Tensor, scan_inputs: tuple[Tensor, ...], through: Pass) -> Tensor:
        """Apply convolution and gated delta rule: [q | k | v] [T, Cn], beta and alpha [T, H] -> y [T, H * V]."""
        q, k, v = self._split_heads(through.convolve(conv_inputs, self.conv1d.weight, None))
        beta, alpha = scan_inputs
        log_decay, strength = decays(beta, alpha, self.dt_bias, self.A_log, max_strength=self.max_strength)
        return through.scan(GATED_DELTA_RULE, q, k, v, log_decay, strength, normalize=True).flatten(1)

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Normalize each head and multiply it with SiLU of its gate."""
        known = self.out_norm.row_norm if isinstance(self.out_norm, NamedNorm) else None
        return norm_then_gate(y, gate, known, self._normed, group_size=self.value_head_dim)

    def _normed(self, y: Tensor) -> Tensor:
        """Normalize each head by itself: [T, H * V] -> [T, H * V]."""
        normed: Tensor = self.out_norm(y.unflatten(-1, (self.value_heads_local, self.value_head_dim)))
        return normed.flatten(-2)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [T, Cn] into q and k [T, G, K], v [T, H, V]; views."""
        q, k, v = qkv.split([self.qk_dim_local, self.qk_dim_local, self.v_dim_local], dim=-1)
        keys, values = (self.key_heads_local, self.key_head_dim), (self.value_heads_local, self.value_head_dim)
        return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values)

    def sections(self) -> Mapping[str, Mapping[str, int]]:
        """Return the rows of each part, with the names of megatron-core's `GatedDeltaNet`."""
        heads = self.value_heads_local
        qkv = {"query": self.qk_dim_local, "key": self.qk_dim_local, "value": self.v_dim_local}
        return {
            "in_proj.weight": {**qkv, "z": self.v_dim_local, "beta": heads, "alpha": heads},
            "conv1d.weight": qkv,
        }
