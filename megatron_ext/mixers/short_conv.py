"""Short convolution with varlen prefill and decode, on any device.

Used by LFM2 beside attention: in_proj -> [B | C | x]; a causal convolution over B * x, without an activation; times C;
out_proj. The state is the convolution's last inputs alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.mixers.mixer import MixerSubmodules, Pass, Projected, RecurrentMixer, mark_split
from megatron_ext.ops.causal_conv1d import PLAIN_CONV1D


class ShortConvMixer(RecurrentMixer):
    """Short convolution layer, see the module. Shapes are per tensor-parallel rank: D channels of d_model.

    Its recurrent state is empty.

    Args:
        config: Reads the dtype of the parameters.
        submodules: Specs of `in_proj` and `out_proj`.
        d_model: Hidden size.
        d_conv: Convolution window K.
        chunk_size: See `RecurrentMixer`, also `placing`.
    """

    state_shape = (0,)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        d_model: int,
        *,
        d_conv: int = ModelConfig.short_conv_kernel_dim,
        chunk_size: int = 128,
        **placing: object,
    ) -> None:
        super().__init__(config, d_conv, chunk_size, **placing)  # type: ignore[arg-type]  # as megatron-core gives them
        assert d_model % self.tp_group.size() == 0, (d_model, self.tp_group.size())
        self.channels_local = d_model // self.tp_group.size()
        self.build_projections(submodules, d_model, 3 * d_model, d_model)
        channels = self.channels_local
        self.conv1d = nn.Conv1d(channels, channels, d_conv, groups=channels, bias=False, dtype=config.params_dtype)
        mark_split(self.conv1d.parameters())

    def split(self, projected: Tensor) -> Projected:
        """Split [T, .] into B * x and C, [T, D] each."""
        b, c, x = projected.chunk(3, dim=-1)
        return Projected(b * x, (), c)

    def mix(self, conv_inputs: Tensor, scan_inputs: tuple[Tensor, ...], through: Pass) -> Tensor:
        """Apply the convolution: B * x [T, D] -> y [T, D]."""
        return through.convolve(conv_inputs, self.conv1d.weight, None, PLAIN_CONV1D)

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return y * C."""
        return y * gate

    def sections(self) -> Mapping[str, Mapping[str, int]]:
        """Return the rows of each part: B, C and x are separate tensors in checkpoints."""
        return {"in_proj.weight": dict.fromkeys("BCx", self.channels_local)}
