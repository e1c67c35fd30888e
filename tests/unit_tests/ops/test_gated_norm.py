"""Gates, and the gated norm, against their formulas in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops.gated_norm import GATED_NORM, gated_norm, silu_gate
from tests.unit_tests.ops.backends import usable
from tests.unit_tests.ops.oracles import assert_close

EPS = 1e-5
DEVICE = platform.device()
backends = pytest.mark.parametrize("backend", usable(GATED_NORM))
sizes = pytest.mark.parametrize(
    ("tokens", "groups", "size"), [(1, 1, 1), (3, 2, 16), (40, 3, 7), (5, 2, 33), (300, 1, 64)]
)


def gate_of(y: Tensor, gate: Tensor) -> Tensor:
    return y.double() * gate.double() * torch.sigmoid(gate.double())


def norm_of(gated: Tensor, weight: Tensor, size: int) -> Tensor:
    grouped = gated.unflatten(-1, (-1, size))
    return (grouped / (grouped.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(-2) * weight.double()


def inputs(tokens: int, channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Y, a gate that is a part of wider rows, and weights."""
    generator = torch.Generator().manual_seed(2)
    y, wide = (torch.randn(tokens, n, generator=generator).to(dtype).to(DEVICE) for n in (channels, 3 * channels + 1))
    return y, wide[:, channels : 2 * channels], torch.randn(channels, generator=generator).to(dtype).to(DEVICE)


@backends
@sizes
def test_gated_norm_equals_its_formula(backend: str, tokens: int, groups: int, size: int) -> None:
    y, gate, weight = inputs(tokens, groups * size)
    with GATED_NORM.forced(backend):
        got = gated_norm(y, gate, weight, group_size=size, eps=EPS)
    assert_close("gated norm", got, norm_of(gate_of(y, gate), weight, size), atol=1e-5, rtol=1e-5)


@backends
@sizes
def test_gate_equals_its_formula(backend: str, tokens: int, groups: int, size: int) -> None:
    y, gate, _ = inputs(tokens, groups * size)
    gate[0, 0], gate[-1, -1] = -100.0, 100.0
    with GATED_NORM.forced(backend):
        got = silu_gate(y, gate)
    assert_close("gate", got, gate_of(y, gate), atol=1e-6, rtol=1e-6)


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_rounded_once(backend: str, dtype: torch.dtype) -> None:
    y, gate, weight = inputs(20, 66, dtype)
    with GATED_NORM.forced(backend):
        outputs = silu_gate(y, gate), gated_norm(y, gate, weight, group_size=33, eps=EPS)
    gated = gate_of(y, gate)
    for got, want in zip(outputs, (gated, norm_of(gated, weight, 33)), strict=True):
        assert got.dtype == dtype
        spacing = torch.finfo(dtype).eps * want.abs() + 1e-6
        assert ((got.double() - want).abs() <= spacing).all()


@backends
def test_rows_know_nothing_of_each_other(backend: str) -> None:
    y, gate, weight = inputs(70, 48)
    with GATED_NORM.forced(backend):
        whole = gated_norm(y, gate, weight, group_size=16, eps=EPS)
        y[10], gate[20] = torch.nan, torch.nan
        broken = gated_norm(y, gate, weight, group_size=16, eps=EPS)
    assert broken[[10, 20]].isnan().all()
    others = [row for row in range(70) if row not in (10, 20)]
    assert torch.equal(broken[others], whole[others])


@backends
def test_the_comparison_can_fail(backend: str) -> None:
    """Negative controls: the norm before the gate, and groups of another size."""
    y, gate, weight = inputs(3, 32)
    with GATED_NORM.forced(backend):
        got = gated_norm(y, gate, weight, group_size=16, eps=EPS)
    for wrong in (gate_of(norm_of(y, weight, 16), gate), norm_of(gate_of(y, gate), weight, 32)):
        with pytest.raises(AssertionError):
            assert_close("gated norm", got, wrong)


def test_gradients() -> None:
    """Training takes the reference, whatever else there is."""
    y, gate, weight = (t.detach().requires_grad_() for t in inputs(4, 12))
    gated_norm(y, gate, weight, group_size=6, eps=EPS).square().sum().backward()
    twins = [t.detach().double().requires_grad_() for t in (y, gate, weight)]
    norm_of(gate_of(*twins[:2]), twins[2], 6).square().sum().backward()
    for mine, true in zip((y, gate, weight), twins, strict=True):
        assert mine.grad is not None
        assert_close("gradient", mine.grad, true.grad, atol=1e-4)


@pytest.mark.parametrize("backend", [name for name in usable(GATED_NORM) if name == "cpp"])
def test_shapes_that_do_not_fit_are_refused(backend: str) -> None:
    y, gate, weight = inputs(3, 32)
    with GATED_NORM.forced(backend):
        with pytest.raises(RuntimeError, match="y and gate are"):
            silu_gate(y, gate[:, :31])
        with pytest.raises(RuntimeError, match="weight is"):
            gated_norm(y, gate, weight[:31], group_size=16, eps=EPS)
        with pytest.raises(RuntimeError, match="groups are whole"):
            gated_norm(y, gate, weight, group_size=5, eps=EPS)
