"""CU-2: products that form states of the gated delta rule are as precise as fp32, for inputs of any dtype."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.mcore import platform
from megatron_ext.ops import triton as kernels

pytestmark = pytest.mark.skipif(
    kernels.problem(platform.device()) is not None, reason=f"no kernel runs here: {kernels.problem(platform.device())}"
)

if kernels.can_be_imported():
    import triton
    import triton.language as tl

    from megatron_ext.ops.gated_delta_rule.kernels import output_product, precise_product

    @triton.jit
    def multiply(a, b, precise, output, ROWS: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr):
        row, inner, column = tl.arange(0, ROWS), tl.arange(0, INNER), tl.arange(0, COLUMNS)
        left = tl.load(a + row[:, None] * INNER + inner[None, :])
        right = tl.load(b + inner[:, None] * COLUMNS + column[None, :])
        target = row[:, None] * COLUMNS + column[None, :]
        tl.store(precise + target, precise_product(left, right))
        tl.store(output + target, output_product(left, right))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_are_as_precise_as_fp32(dtype: torch.dtype) -> None:
    """CU-2: a piece that is left out, or scaled back wrongly, is 2**-17 of the result or more."""
    device = platform.device()
    a = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    b = torch.randn(64, 16, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 6, 16)
    precise, output = torch.empty(2, 32, 16, device=device)
    multiply[(1,)](a.to(device), b.to(device), precise, output, ROWS=32, INNER=64, COLUMNS=16)
    want = a.double() @ b.double()
    largest = want.abs().amax(0)  # of a column, which has a scale of its own
    assert ((precise.cpu() - want).abs() / largest).max() < 1.5e-6
    assert ((output.cpu() - want).abs() / largest).max() < 1e-3
