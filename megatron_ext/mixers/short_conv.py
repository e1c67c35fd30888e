"""Short convolution with varlen prefill and decode, on any device.

Used by LFM2 beside attention: in_proj -> [B | C | x]; a causal convolution over B * x, without an activation; times C;
out_proj. The state is the convolution's last inputs alone.
"""

from __future__ import annotations

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_ext.config import ModelConfig
from megatron_ext.mixers.mixer import MixerSubmodules, Pass, Projected, RecurrentMixer, mark_split
from megatron_ext.mixers.sharding import Metadata, Offsets, sharded_mixer_state
from megatron_ext.ops.causal_conv1d import PLAIN_CONV1D

_NO_STATE = (0,)  # shape of the recurrent state, which this mixer lacks


class ShortConvMixer(RecurrentMixer):
    """Short convolution layer, see the module. Shapes are per tensor-parallel rank: D channels of d_model.

    Args:
        config: Reads the dtype of the parameters.
        submodules: Specs of `in_proj` and `out_proj`.
        d_model: Hidden size.
        d_conv: Convolution window K.
        chunk_size: Tokens of a chunk in training; at inference the context's metadata decides.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MixerSubmodules,
        d_model: int,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
        d_conv: int = ModelConfig.short_conv_kernel_dim,
        chunk_size: int = 128,
    ) -> None:
        super().__init__(config)
        assert pg_collection is not None, "pg_collection must be provided for ShortConvMixer"
        self.layer_number, self.pp_layer_offset, self.chunk_size = layer_number, pp_layer_offset, chunk_size
        self.d_conv = d_conv
        self.tp_group = pg_collection.tp
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

    def mamba_state_shapes_per_request(self) -> tuple[tuple[int, int], tuple[int]]:
        """Shapes of one request's convolution state (D, K-1) and of its empty recurrent state."""
        return (self.channels_local, self.d_conv - 1), _NO_STATE

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """Return the distributed checkpoint state: B, C and x are separate tensors there."""
        split = {"in_proj.weight": dict.fromkeys("BCx", self.channels_local)}
        return sharded_mixer_state(self, split, prefix, sharded_offsets, metadata)
