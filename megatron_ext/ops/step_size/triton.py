"""Step sizes and decays in Triton, for CUDA devices: one launch each, with the kernels in `kernels.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.step_size import reference
from megatron_ext.ops.step_size.reference import StepSizeBackend
from megatron_ext.ops.triton.launching import rows_of, say_reference_computes


def _lacks(projected: Tensor, A_log: Tensor, *others: Tensor) -> str | None:
    """Return why there is no kernel for these inputs; None if there is one."""
    from megatron_ext.ops.step_size import kernels

    different = [one.dtype for one in others if one.dtype != projected.dtype]
    if different:
        return f"step sizes have no kernel for projections of {projected.dtype} and {different[0]}"
    return kernels.step_sizes.lacks(T=projected.dtype, A=A_log.dtype)


def step_sizes(dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    lack = _lacks(dt, A_log, bias)
    if lack is not None:
        say_reference_computes(lack)
        return reference.step_sizes(dt, bias, A_log)
    from megatron_ext.ops.step_size import kernels

    dt, A_log, (config,) = rows_of(dt), A_log.contiguous(), kernels.step_sizes.configs
    sizes, rates = (torch.empty(one.shape, dtype=torch.float32, device=dt.device) for one in (dt, A_log))
    rows, heads = dt.shape
    kernels.step_sizes.launch(
        (rows + rates.numel() // heads, -(-heads // config["BLOCK"])),
        config,
        dt=dt,
        bias=bias.contiguous(),
        A_log=A_log,
        sizes=sizes,
        rates=rates,
        dt_row=dt.stride(0),
        heads=heads,
        rows=rows,
    )
    return sizes, rates


def decays(
    beta: Tensor, alpha: Tensor, bias: Tensor, A_log: Tensor, *, max_strength: float = 1.0
) -> tuple[Tensor, Tensor]:
    lack = _lacks(alpha, A_log, beta, bias)
    if lack is not None:
        say_reference_computes(lack)
        return reference.decays(beta, alpha, bias, A_log, max_strength=max_strength)
    from megatron_ext.ops.step_size import kernels

    beta, alpha, (config,) = rows_of(beta), rows_of(alpha), kernels.delta_decays.configs
    log_decays, strengths = (torch.empty(alpha.shape, dtype=torch.float32, device=alpha.device) for _ in range(2))
    kernels.delta_decays.launch(
        (alpha.shape[0], -(-alpha.shape[1] // config["BLOCK"])),
        config,
        beta=beta,
        alpha=alpha,
        bias=bias.contiguous(),
        A_log=A_log.contiguous(),
        log_decays=log_decays,
        strengths=strengths,
        beta_row=beta.stride(0),
        alpha_row=alpha.stride(0),
        heads=alpha.shape[1],
        max_strength=max_strength,
    )
    return log_decays, strengths


BACKEND = StepSizeBackend(triton.NAME, triton.takes, step_sizes, decays)
