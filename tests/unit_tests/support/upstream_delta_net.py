"""Gated delta net of megatron-core on the CPU: it requires its kernels when built, and calls none of them."""

from __future__ import annotations

import sys

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
    owner = next(cls for cls in gated_delta_net.GatedDeltaNet.__mro__ if "_apply_gated_norm" in vars(cls))
    module = sys.modules[owner.__module__]  # of its parent, on newer versions
    patch.setattr(module, "HAVE_FLA", True)
    patch.setattr(module, "l2norm", l2norm, raising=False)
    for name, compiled in list(vars(owner).items()):  # `torch.compile` takes seconds and a compiler
        if hasattr(compiled, "_torchdynamo_orig_callable"):
            patch.setattr(owner, name, compiled._torchdynamo_orig_callable)
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def without_kernels(config: TransformerConfig) -> TransformerConfig:
    """Choose its fallback in plain torch, and SiLU, which its kernels have built in (in place)."""
    config.activation_func, config.deterministic_mode = torch.nn.functional.silu, True
    config.perform_initialization = False  # that of the gated delta net draws from CUDA's generators
    return config
