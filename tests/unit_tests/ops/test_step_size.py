"""Step sizes, rates, decays and strengths against their formulas in fp64, over every backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.step_size import STEP_SIZE, decays, step_sizes
from megatron_ext.ops.triton.kernel_registry import watch
from tests.unit_tests.ops.backends import usable

COVERED = ("step_sizes", "delta_decays")
DEVICE = platform.device()
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, params=usable(STEP_SIZE))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend keeps the whole contract."""
    with STEP_SIZE.forced(request.param):
        yield request.param


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4)).to(dtype).to(DEVICE)


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(x.double().exp())


def assert_right(got: Tensor, want: Tensor, relative: float = 1e-5) -> None:
    """Check nearly all digits, even of a step size of a thousandth."""
    assert got.dtype is torch.float32
    assert ((got.double() - want.cpu()).abs() <= relative * want.cpu().abs()).all()


@pytest.mark.parametrize("rates", TYPES[:2], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sizes_and_rates_equal_their_formulas(dtype: torch.dtype, rates: torch.dtype) -> None:
    """CU-1, CU-2: sizes of heads, and of channels with several states; dt is a slice of wider rows, possibly small."""
    for heads, states in ((5, ()), (300, (3,))):
        dt = (numbers(3, heads + 9, dtype=dtype) * 4 - 6)[:, 4 : 4 + heads]
        bias, log = numbers(heads, dtype=dtype), numbers(heads, *states, dtype=rates)
        sizes, found = step_sizes(dt, bias, log)
        assert found.shape == log.shape
        assert_right(sizes, softplus(dt.float() + bias.float()))
        assert_right(found, -log.double().exp())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_decays_equal_their_formulas(dtype: torch.dtype) -> None:
    """CU-1, CU-2."""
    wide, bias, log = numbers(4, 27, dtype=dtype), numbers(7, dtype=dtype), numbers(7, dtype=dtype)
    beta, alpha = wide[:, :7], wide[:, 8:15]
    found, strengths = decays(beta, alpha, bias, log, max_strength=2.0)
    assert_right(found, -log.double().exp() * softplus(alpha.float() + bias.float()))
    assert_right(strengths, 2 * beta.double().sigmoid())
    with pytest.raises(AssertionError):
        assert_right(strengths, beta.double().sigmoid())


def test_extremes() -> None:
    """Steps as small as 1e-9 and as large as 300; nothing overflows."""
    dt = torch.tensor([[-20.0, -6.9, 0.0, 19.0, 21.0, 300.0]], device=DEVICE)
    sizes, _ = step_sizes(dt, torch.zeros(6, device=DEVICE), torch.zeros(6, device=DEVICE))
    want = torch.where(dt.cpu() > 100, dt.cpu().double(), softplus(dt.cpu()))
    assert_right(sizes, want)


def test_one_launch_for_all_and_the_reference_where_there_is_none(backend: str) -> None:
    """CU-1, CU-3."""
    dt, log = numbers(3, 4), numbers(4)
    with watch() as launches:
        step_sizes(dt, log, log)
        decays(dt, dt, log, log)
        sizes, _ = step_sizes(dt.double(), log.double(), log)
    assert [one.kernel for one in launches] == list(COVERED) * (backend == triton.NAME)
    assert_right(sizes, softplus(dt.float() + log.float()))
