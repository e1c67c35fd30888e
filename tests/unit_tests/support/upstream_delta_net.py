"""Gated delta net of megatron-core on the CPU: it requires its kernels when built, and calls none of them."""

from __future__ import annotations

import pytest
import torch
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer import TransformerConfig
from torch import Tensor


def l2norm(x: Tensor) -> Tensor:
    """Reference of flash-linear-attention's `l2norm`."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def allow(patch: pytest.MonkeyPatch) -> None:
    """Let upstream's class be built and run without flash-linear-attention and without CUDA."""
    patch.setattr(gated_delta_net, "HAVE_FLA", True)
    patch.setattr(gated_delta_net, "l2norm", l2norm, raising=False)
    compiled = gated_delta_net.GatedDeltaNet._apply_gated_norm  # `torch.compile` takes seconds and a compiler
    plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    patch.setattr(gated_delta_net.GatedDeltaNet, "_apply_gated_norm", plain)
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def without_kernels(config: TransformerConfig) -> TransformerConfig:
    """Choose its fallback in plain torch, and SiLU, which its kernels have built in (in place)."""
    config.activation_func, config.deterministic_mode = torch.nn.functional.silu, True
    config.perform_initialization = False  # that of the gated delta net draws from CUDA's generators
    return config
