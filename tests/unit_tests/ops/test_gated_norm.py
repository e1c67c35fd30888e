"""Gates, and the gated norm, against their formulas in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.gated_norm import (
    GATED_NORM,
    NamedNorm,
    RowNorm,
    add_and_norm,
    gated_norm,
    norm_then_gate,
    rms_norm,
    silu_gate,
)
from megatron_ext.ops.triton.kernel_registry import watch
from tests.unit_tests.ops.backends import interpreted, params, usable
from tests.unit_tests.ops.oracles import assert_close

COVERED = ("norm_rows", "gate_rows", "add_norm_rows")
EPS = 1e-5
DEVICE = platform.device()
backends = pytest.mark.parametrize("backend", params(GATED_NORM))
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
        spacing = torch.finfo(dtype).eps * want.cpu().abs() + 1e-6
        assert ((got.double() - want.cpu()).abs() <= spacing).all()


def plainly(weight: Tensor, size: int, offset: float = 0.0):
    """The norm as a caller has it in plain torch."""

    def run(y: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(y.float().unflatten(-1, (-1, size)), (size,), eps=EPS)
        return (normed * (weight.float() + offset).unflatten(0, (-1, size))).flatten(-2)

    return run


def near(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Relative to each number; results come back to the CPU, wherever they were computed."""
    return bool(((got.double() - want.cpu()).abs() <= tolerance * want.cpu().abs() + 2e-5).all())


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("groups", "size", "offset"), [(3, 7, 0.0), (2, 16, 1.0), (1, 1500, 0.0), (1, 5000, 0.0)])
def test_norms_before_gates_and_alone(backend: str, dtype: torch.dtype, groups: int, size: int, offset: float) -> None:
    """CU-1, CU-2: weights of all channels and of those of a group; groups larger than a program's block; offsets."""
    y, gate, weight = inputs(2, groups * size, dtype)
    y, gate = y[:, : groups * size], gate[:, : groups * size]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for own in (weight, weight[:size]):
        norm, every = RowNorm(own, EPS, offset), own.repeat(len(weight) // len(own))
        with GATED_NORM.forced(backend):
            got = norm_then_gate(y, gate, norm, plainly(every, size, offset), group_size=size)
        want = gate_of(norm_of(y.double(), every.double() + offset, size), gate)
        assert got.dtype is dtype
        assert near(got, want, tolerance)
    norm, heads = RowNorm(weight[:size], EPS, offset), y.unflatten(-1, (groups, size))
    with GATED_NORM.forced(backend):
        got = rms_norm(heads, norm, lambda x: plainly(weight[:size], size, offset)(x.flatten(1)).view_as(x).to(dtype))
    want = norm_of(y.double(), (weight[:size].double() + offset).repeat(groups), size).view_as(heads)
    assert near(got, want, tolerance)


class Named(NamedNorm):
    """Norm that reports its name."""

    def __init__(self, weight: Tensor | None, offset: float) -> None:
        self._row_norm = RowNorm(weight, EPS, offset)

    @property
    def row_norm(self) -> RowNorm:
        return self._row_norm


@pytest.mark.skipif(triton.NAME not in usable(GATED_NORM), reason="no kernel runs here")
@pytest.mark.parametrize("backend", [pytest.param(triton.NAME, marks=interpreted(triton.NAME))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "factor", "offset"), [(16, 1.0, 0.0), (1500, 0.3, 1.0), (5000, 1.0, 0.0)])
def test_sums_and_their_norms(backend: str, dtype: torch.dtype, size: int, factor: float, offset: float) -> None:
    """CU-1, CU-2: the sum as plain torch rounds it, and the norm of what was rounded; nothing is written over."""
    output, _, weight = inputs(3, size, dtype)
    residual = output.flip(0).contiguous()
    before = output.clone(), residual.clone()
    with GATED_NORM.forced(backend), watch() as launches:
        found = add_and_norm(output, residual, Named(weight, offset), factor)
        bare = add_and_norm(output, residual, Named(None, 0.0), factor)
    assert [one.kernel for one in launches] == ["add_norm_rows"] * 2
    assert found is not None
    assert bare is not None
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    assert_close("sum", found[0], (output * factor + residual).cpu().double(), atol=tolerance, rtol=tolerance)
    if dtype is torch.float16 and factor == 1.0:  # the interpreter cuts bf16 off; a device may fuse a product and a sum
        assert torch.equal(found[0], (output + residual).cpu())
    assert near(found[1], norm_of(found[0].double(), weight.cpu().double() + offset, size), tolerance)
    assert near(bare[1], norm_of(bare[0].double(), torch.ones(size), size), tolerance)
    assert torch.equal(output, before[0])
    assert torch.equal(residual, before[1])


@backends
def test_sums_and_norms_that_are_no_kernels(backend: str) -> None:
    """Norms that do not say what they are, and backends without one: the caller computes one by one."""
    y, _, weight = inputs(3, 16)
    with GATED_NORM.forced(backend):
        assert add_and_norm(y, y, torch.nn.LayerNorm(16), 1.0) is None
        assert (add_and_norm(y, y, Named(weight, 0.0), 1.0) is None) == (backend != triton.NAME)
        assert add_and_norm(y, y[:, :8], Named(weight, 0.0), 1.0) is None


@pytest.mark.parametrize("backend", usable(GATED_NORM))
def test_one_launch_each_and_plain_torch_where_there_is_none(backend: str) -> None:
    """CU-1, CU-3: a gate of another type."""
    y, gate, weight = inputs(3, 32)
    norm = RowNorm(weight, EPS)
    with GATED_NORM.forced(backend), watch() as launches:
        gated_norm(y, gate, weight, group_size=16, eps=EPS)
        norm_then_gate(y, gate, norm, plainly(weight, 16), group_size=16)
        rms_norm(y, norm, plainly(weight, 32))
        silu_gate(y, gate)
    assert [one.kernel for one in launches] == ["norm_rows"] * 3 * (backend == triton.NAME) + ["gate_rows"] * (
        backend == triton.NAME
    )
    if backend == triton.NAME:
        with GATED_NORM.forced(backend), watch() as launches:
            got = gated_norm(y, gate.half(), weight, group_size=16, eps=EPS)
        assert not launches
        assert got.dtype is torch.float16


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
