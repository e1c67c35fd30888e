"""Step sizes and decays in Triton, for CUDA devices: one launch each, with the kernels in `kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.step_size.reference import StepSizeBackend
from megatron_ext.ops.triton.launching import require_one_type, rowed


def step_sizes(dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    from megatron_ext.ops.step_size import kernels

    require_one_type("step sizes", dt, bias)
    kernels.step_sizes.require(T=dt.dtype, A=A_log.dtype)
    A_log, (config,) = A_log.contiguous(), kernels.step_sizes.configs
    sizes, rates = (torch.empty(one.shape, dtype=torch.float32, device=dt.device) for one in (dt, A_log))
    rows, heads = dt.shape
    kernels.step_sizes.launch(
        (rows + rates.numel() // heads, -(-heads // config["BLOCK"])),
        config,
        **rowed(dt=dt),
        bias=bias.contiguous(),
        A_log=A_log,
        sizes=sizes,
        rates=rates,
        heads=heads,
        rows=rows,
    )
    return sizes, rates


def decays(
    beta: Tensor, alpha: Tensor, bias: Tensor, A_log: Tensor, *, max_strength: float = 1.0
) -> tuple[Tensor, Tensor]:
    from megatron_ext.ops.step_size import kernels

    require_one_type("decays", alpha, beta, bias)
    kernels.delta_decays.require(T=alpha.dtype, A=A_log.dtype)
    (config,) = kernels.delta_decays.configs
    log_decays, strengths = (torch.empty(alpha.shape, dtype=torch.float32, device=alpha.device) for _ in range(2))
    kernels.delta_decays.launch(
        (alpha.shape[0], -(-alpha.shape[1] // config["BLOCK"])),
        config,
        **rowed(beta=beta, alpha=alpha),
        bias=bias.contiguous(),
        A_log=A_log.contiguous(),
        log_decays=log_decays,
        strengths=strengths,
        heads=alpha.shape[1],
        max_strength=max_strength,
    )
    return log_decays, strengths


BACKEND = StepSizeBackend(triton.NAME, triton.takes, step_sizes, decays)
