"""Activations, step sizes, rates, decays and strengths against their formulas in fp64, over every backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.activation import ACTIVATION, gated_silu, squared_relu_
from megatron_ext.ops.step_size import STEP_SIZE, decays, step_sizes
from megatron_ext.ops.triton.kernel_registry import watch
from tests.unit_tests.ops.backends import usable

COVERED = ("relu_squared", "step_sizes", "delta_decays")  # and `gate_rows`, see test_gated_norm.py
DEVICE = platform.device()
TYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDINGS = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}  # plain torch rounds SiLU, too


@pytest.fixture(autouse=True, params=usable(ACTIVATION))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend keeps the whole contract."""
    with ACTIVATION.forced(request.param), STEP_SIZE.forced(request.param):
        yield request.param


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(6)) * 2).to(dtype).to(DEVICE)


def assert_right(got: Tensor, want: Tensor) -> None:
    want = want.cpu()
    assert ((got.double() - want).abs() <= ROUNDINGS[got.dtype] * want.abs() + 1e-6).all()


def assert_digits(got: Tensor, want: Tensor) -> None:
    """Check nearly all digits, even of a step size of a thousandth."""
    assert got.dtype is torch.float32
    assert ((got.double() - want.cpu()).abs() <= 1e-5 * want.cpu().abs()).all()


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(x.double().exp())


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


@pytest.mark.parametrize("rates", TYPES[:2], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sizes_and_rates_equal_their_formulas(dtype: torch.dtype, rates: torch.dtype) -> None:
    """CU-1, CU-2: sizes of heads, and of channels with several states; dt is a slice of wider rows, possibly small."""
    for heads, states in ((5, ()), (300, (3,))):
        dt = (numbers(3, heads + 9, dtype=dtype) * 2 - 6)[:, 4 : 4 + heads]
        bias, log = numbers(heads, dtype=dtype), numbers(heads, *states, dtype=rates)
        sizes, found = step_sizes(dt, bias, log)
        assert found.shape == log.shape
        assert_digits(sizes, softplus(dt.float() + bias.float()))
        assert_digits(found, -log.double().exp())


def test_extreme_step_sizes() -> None:
    """Steps as small as 1e-9 and as large as 300; nothing overflows."""
    dt = torch.tensor([[-20.0, -6.9, 0.0, 19.0, 21.0, 300.0]], device=DEVICE)
    sizes, _ = step_sizes(dt, torch.zeros(6, device=DEVICE), torch.zeros(6, device=DEVICE))
    assert_digits(sizes, torch.where(dt.cpu() > 100, dt.cpu().double(), softplus(dt.cpu())))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_decays_equal_their_formulas(dtype: torch.dtype) -> None:
    """CU-1, CU-2."""
    wide, bias, log = numbers(4, 27, dtype=dtype), numbers(7, dtype=dtype), numbers(7, dtype=dtype)
    beta, alpha = wide[:, :7], wide[:, 8:15]
    found, strengths = decays(beta, alpha, bias, log, max_strength=2.0)
    assert_digits(found, -log.double().exp() * softplus(alpha.float() + bias.float()))
    assert_digits(strengths, 2 * beta.double().sigmoid())
    with pytest.raises(AssertionError):
        assert_digits(strengths, beta.double().sigmoid())


def test_one_launch_each_and_the_reference_where_there_is_none(backend: str) -> None:
    """CU-1, CU-3: tensors not in one piece and of fp64 use the reference."""
    dt, log = numbers(3, 4), numbers(4)
    with watch() as launches:
        squared_relu_(numbers(2, 8))
        step_sizes(dt, log, log)
        decays(dt, dt, log, log)
        gated_silu(numbers(2, 8))
        got = gated_silu(numbers(2, 16)[:, :8])
        sizes, _ = step_sizes(dt.double(), log.double(), log)
    assert [one.kernel for one in launches] == [*COVERED, "gate_rows"] * (backend == triton.NAME)
    gate, up = numbers(2, 16)[:, :8].double().chunk(2, dim=-1)
    assert_right(got, torch.nn.functional.silu(gate) * up)
    assert_digits(sizes, softplus(dt.float() + log.float()))
