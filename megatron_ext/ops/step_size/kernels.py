"""Step sizes, rates, decays and strengths on a CUDA device: element by element, one launch for all of a layer."""

import triton
import triton.language as tl

from megatron_ext.ops.triton.kernel_registry import FLOATS, config, kernel

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
    strides="dt_row heads",
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
    strides="beta_row alpha_row heads",
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
