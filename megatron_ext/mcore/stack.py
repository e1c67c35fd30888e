"""The stack of layers, without Transformer Engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor


class LayerNormFromConfig:
    """A torch norm with the configuration's epsilon and type, wherever it stands.

    Upstream's `MambaLayer` builds its norm without an epsilon and so with 1e-5, whatever the configuration says, and
    upstream's wrapper makes fp32 weights in a model of any type.
    """

    def __new__(  # type: ignore[misc]  # upstream's specs want a class
        cls, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: object
    ) -> torch.nn.Module:
        """The norm itself, as upstream's wrapper class does."""
        if config.layernorm_zero_centered_gamma:
            return ZeroCenteredRMSNorm(hidden_size, config.layernorm_epsilon, config.params_dtype)
        norm = WrappedTorchNorm(config, hidden_size, eps=config.layernorm_epsilon)
        return norm.to(config.params_dtype)


class HeadNormFromConfig:
    """The norm of each query or key head, or nothing, as the configuration says."""

    def __new__(  # type: ignore[misc]  # as above
        cls, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: object
    ) -> torch.nn.Module:
        """The norm itself."""
        return LayerNormFromConfig(config, hidden_size, eps) if config.qk_layernorm else IdentityOp()


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMSNorm that multiplies by 1 + weight, in fp32: in 16 bits a weight near 0 says more than one near 1.

    What Transformer Engine's norms compute with `zero_centered_gamma`.
    """

    def __init__(self, channels: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(channels, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., channels] -> the same, in the same type."""
        normed = F.rms_norm(hidden.float(), self.weight.shape, eps=self.eps)
        return torch.addcmul(normed, normed, self.weight.float()).to(hidden.dtype)


class HybridStack(MambaStack):
    """`MambaStack` whose final norm is torch's, and whose stages may hold any number of layers each.

    Upstream hard-codes Transformer Engine's norm, and knows of no layout of stages.
    """

    def __init__(
        self, config: TransformerConfig, *args: object, post_layer_norm: bool = True, **kwargs: object
    ) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = LayerNormFromConfig(config, config.hidden_size)

    def _select_layers_for_pipeline_parallel(self, layer_type_list: list[str]) -> tuple[int, list[str]]:
        """How many layers come before this stage, and the letters of its own."""
        layout = self.config.pipeline_model_parallel_layout
        if layout is None:
            return super()._select_layers_for_pipeline_parallel(layer_type_list)
        own = layout.get_layer_id_list(pp_rank=self.pp_group.rank())
        return own[0], [layer_type_list[number] for number in own]
