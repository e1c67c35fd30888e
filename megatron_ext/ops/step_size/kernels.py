"""Step sizes, rates, decays and strengths on a CUDA device: element by element, one launch for all of a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.triton.kernel_registry import FLOATS, config, kernel
from megatron_ext.ops.triton.launching import require_one_type, rowed

TYPES = [{"T": inputs, "A": rates} for inputs in FLOATS for rates in dict.fromkeys((FLOATS[0], inputs))]


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), accurate in all digits near 0, too, since step sizes are small."""
    small = tl.exp(-tl.abs(x))
    sum_ = 1.0 + small
    rest = tl.where(sum_ == 1.0, small, tl.log(sum_) * small / (sum_ - 1.0))  # log(1 + small)
    return tl.maximum(x, 0.0) + rest


@kernel(
    pointers={"T": "dt bias", "A": "A_log", "fp32": "sizes rates"},
    counts="rows",
    types=TYPES,
    configs=[config(BLOCK=256)],
)
def step_sizes(dt, bias, A_log, sizes, rates, dt_row, heads, rows, BLOCK: tl.constexpr):
    """Compute sizes [rows, heads], then rates in rows of `heads`; the grid is (rows of both, blocks of heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_head = head < heads
    if row < rows:
        x = tl.load(dt + row * dt_row + head, mask=is_head, other=0.0).to(tl.float32)
        x += tl.load(bias + head, mask=is_head, other=0.0).to(tl.float32)
        tl.store(sizes + row * heads + head, softplus(x), mask=is_head)
    else:
        own = (row - rows) * heads + head
        log = tl.load(A_log + own, mask=is_head, other=0.0).to(tl.float32)
        tl.store(rates + own, -tl.exp(log), mask=is_head)


@kernel(
    pointers={"T": "beta alpha bias", "A": "A_log", "fp32": "log_decays strengths"},
    scalars="max_strength",
    types=TYPES,
    configs=[config(BLOCK=256)],
)
def delta_decays(
    beta, alpha, bias, A_log, log_decays, strengths, beta_row, alpha_row, heads, max_strength,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute decays and write strengths (beta), [rows, heads]; the grid is (rows, blocks of heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_head, at = head < heads, row * heads + head
    x = tl.load(alpha + row * alpha_row + head, mask=is_head, other=0.0).to(tl.float32)
    x += tl.load(bias + head, mask=is_head, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + head, mask=is_head, other=0.0).to(tl.float32))
    tl.store(log_decays + at, rate * softplus(x), mask=is_head)
    strength = tl.sigmoid(tl.load(beta + row * beta_row + head, mask=is_head, other=0.0).to(tl.float32))
    tl.store(strengths + at, strength * max_strength, mask=is_head)


def launch_step_sizes(dt: Tensor, bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    require_one_type("step sizes", dt, bias)
    step_sizes.require(T=dt.dtype, A=A_log.dtype)
    A_log, (config,) = A_log.contiguous(), step_sizes.configs
    sizes, rates = (torch.empty(one.shape, dtype=torch.float32, device=dt.device) for one in (dt, A_log))
    rows, heads = dt.shape
    step_sizes.launch(
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


def launch_decays(
    beta: Tensor, alpha: Tensor, bias: Tensor, A_log: Tensor, *, max_strength: float = 1.0
) -> tuple[Tensor, Tensor]:
    require_one_type("decays", alpha, beta, bias)
    delta_decays.require(T=alpha.dtype, A=A_log.dtype)
    (config,) = delta_decays.configs
    log_decays, strengths = (torch.empty(alpha.shape, dtype=torch.float32, device=alpha.device) for _ in range(2))
    delta_decays.launch(
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
