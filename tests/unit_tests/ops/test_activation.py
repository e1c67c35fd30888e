"""Activations of MLPs against their formulas in fp64, over every backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.activation import ACTIVATION, gated_silu, squared_relu_
from megatron_ext.ops.triton.kernel_registry import watch
from tests.unit_tests.ops.backends import usable

COVERED = ("relu_squared",)  # and `gate_rows`, see test_gated_norm.py
DEVICE = platform.device()
TYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDINGS = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}  # plain torch rounds SiLU, too


@pytest.fixture(autouse=True, params=usable(ACTIVATION))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend keeps the whole contract."""
    with ACTIVATION.forced(request.param):
        yield request.param


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(6)) * 2).to(dtype).to(DEVICE)


def assert_right(got: Tensor, want: Tensor) -> None:
    want = want.cpu()
    assert ((got.double() - want).abs() <= ROUNDINGS[got.dtype] * want.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_squared_relu_equals_its_formula_in_place(dtype: torch.dtype) -> None:
    """CU-1, CU-2."""
    x = numbers(2, 1, 1030, dtype=dtype)
    want = x.double().clamp(min=0).square()
    got = squared_relu_(x)
    assert torch.equal(got, x.cpu()), "written over what was given"
    assert_right(got, want)


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gated_silu_equals_its_formula(dtype: torch.dtype, factor: float) -> None:
    """CU-1, CU-2: the gates come first; the factor is the gate's."""
    inner = numbers(3, 1, 2 * 1027, dtype=dtype)
    gate, up = inner.double().chunk(2, dim=-1)
    want = torch.nn.functional.silu(factor * gate) * up
    got = gated_silu(inner, factor)
    assert got.dtype is dtype
    assert_right(got, want)
    with pytest.raises(AssertionError):
        assert_right(got, torch.nn.functional.silu(factor * up) * gate)


def test_one_launch_each_and_the_reference_where_there_is_none(backend: str) -> None:
    """CU-1, CU-3: tensors not in one piece use the reference."""
    with watch() as launches:
        squared_relu_(numbers(2, 8))
        gated_silu(numbers(2, 8))
        got = gated_silu(numbers(2, 16)[:, :8])
    assert [one.kernel for one in launches] == ["relu_squared", "gate_rows"] * (backend == triton.NAME)
    gate, up = numbers(2, 16)[:, :8].double().chunk(2, dim=-1)
    assert_right(got, torch.nn.functional.silu(gate) * up)
