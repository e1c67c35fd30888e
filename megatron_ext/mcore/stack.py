"""The stack of layers, without Transformer Engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import WrappedTensor
from torch import Tensor

from megatron_ext.mcore.layers import is_plain_inference


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
        if config.normalization == "RMSNorm":
            return PlainRMSNorm(hidden_size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        norm = WrappedTorchNorm(config, hidden_size, eps=config.layernorm_epsilon)
        return norm.to(config.params_dtype)


class HeadNormFromConfig:
    """The norm of each query or key head, or nothing, as the configuration says."""

    def __new__(  # type: ignore[misc]  # as above
        cls, config: TransformerConfig, hidden_size: int, eps: float | None = None, **_: object
    ) -> torch.nn.Module:
        """The norm itself."""
        return LayerNormFromConfig(config, hidden_size, eps) if config.qk_layernorm else IdentityOp()


class PlainRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`; at inference in two passes over memory in place of five, where torch has no kernel for it."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> the same."""
        if torch.is_inference_mode_enabled() and x.dtype is torch.float32 and x.device.type == "cpu":
            return rms_norm(x, self.weight, self.eps)
        return super().forward(x)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """RMSNorm over the last axis, by its length: |x|^2 / channels is the mean square. In x's type, which is fp32."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    normed = x * length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return normed if weight is None else normed.mul_(weight)


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

    def forward(
        self,
        hidden_states: Tensor | WrappedTensor,
        attention_mask: Tensor | None = None,
        inference_context: BaseInferenceContext | None = None,
        rotary_pos_emb: Tensor | None = None,
        **options: object,
    ) -> Tensor:
        """[s, b, h] -> the same, layer after layer; upstream's forward where more than that is wanted."""
        if not is_plain_inference(self) or (inference_context is not None and inference_context.is_static_batching()):
            return super().forward(hidden_states, attention_mask, inference_context, rotary_pos_emb, **options)
        if not self.pre_process:
            hidden_states = self.input_tensor
        elif isinstance(hidden_states, WrappedTensor):
            hidden_states = hidden_states.unwrap()
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, attention_mask, inference_context=inference_context, rotary_pos_emb=rotary_pos_emb
            )
            if isinstance(hidden_states, tuple):
                hidden_states = hidden_states[0]
        return self.final_norm(hidden_states) if self.post_process and self.post_layer_norm else hidden_states
