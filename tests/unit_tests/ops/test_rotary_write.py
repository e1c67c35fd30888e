"""Rotated queries, and keys and values in their blocks, over every backend: layouts, padding, untouched places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_ext.mcore import platform
from megatron_ext.ops import triton
from megatron_ext.ops.gated_norm import NamedNorm, RowNorm
from megatron_ext.ops.rotary import ROTARY_WRITE, Heads, Rotation, rotate, rotate_and_write
from megatron_ext.ops.triton.kernel_registry import watch
from tests.unit_tests.ops.backends import params

COVERED = ("rotate_and_write",)
DEVICE = platform.device()
TYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK, BLOCKS = 4, 5
SLOTS = [17, 0, 6, 19, 7]  # of five tokens, in blocks of four


@pytest.fixture(autouse=True, params=params(ROTARY_WRITE))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every backend keeps the whole contract."""
    with ROTARY_WRITE.forced(request.param):
        yield request.param


@dataclass
class Case:
    """Case of consecutive tokens, of which some are padding, and pools of NaN of two layers."""

    heads: Heads
    rotation: Rotation | None
    pools: Tensor

    def write(self, slots: list[int] = SLOTS) -> Tensor:
        where = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
        return rotate_and_write(self.heads, self.rotation, *self.pools[:, 1], where)

    def rotated(self, states: Tensor, which: int) -> Tensor:
        """Plain torch, of queries or keys [T, heads, D]."""
        if self.heads.norms is not None:
            states = self.heads.norms[which](states)
        if self.rotation is None:
            return states
        return rotate(states.unsqueeze(1), self.rotation).squeeze(1).to(states.device)


def case(
    dtype: torch.dtype = torch.float32, groups: int = 2, shared: int = 3, channels: int = 16, half: int = 5
) -> Case:
    """Queries, keys and values as a projection has them, side by side; seven tokens, the last two are padding."""
    generator = torch.Generator().manual_seed(groups + shared)
    mixed = torch.randn(7, groups, (shared + 2) * channels, generator=generator).to(dtype).to(DEVICE)
    query, key, value = mixed.split([shared * channels, channels, channels], dim=-1)
    angles = torch.rand(7, 1, 1, half, generator=generator) * 9
    rotation = Rotation(*(one.to(dtype).to(DEVICE) for one in (angles.cos(), angles.sin()))) if half else None
    pools = torch.full((2, 2, BLOCKS, BLOCK, groups, channels), torch.nan, dtype=dtype, device=DEVICE)
    return Case(Heads(query.unflatten(-1, (shared, channels)), key, value), rotation, pools)


def check(one: Case, query: Tensor, slots: list[int] = SLOTS, *, is_exact: bool) -> None:
    """Against plain torch: to the bit, or within the rounding of 16 bits, and nothing else in the pools."""
    wanted = torch.full_like(one.pools, torch.nan)
    for cache, states in zip(wanted[:, 1], (one.rotated(one.heads.key, 1), one.heads.value), strict=True):
        cache.flatten(0, 1)[slots] = states[: len(slots)]
    rounding = 1e-5 if query.dtype is torch.float32 else 2**-5
    close = {"rtol": 0, "atol": 0} if is_exact else {"rtol": rounding, "atol": rounding}
    torch.testing.assert_close(query, one.rotated(one.heads.query.flatten(1, 2), 0).cpu(), **close)
    torch.testing.assert_close(one.pools, wanted, equal_nan=True, **close)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("groups", "shared", "channels", "half"), [(2, 3, 16, 5), (1, 1, 70, 35), (3, 4, 130, 20), (9, 1, 8, 0)]
)
def test_rotated_and_written(dtype: torch.dtype, groups: int, shared: int, channels: int, half: int) -> None:
    """CU-1, CU-2: rotation of some, all or no channels; more heads than a program has; padding is not written.

    Triton's interpreter cuts bf16 off where a device rounds; fused products of a device differ in fp32.
    """
    one = case(dtype, groups, shared, channels, half)
    query = one.write()
    check(one, query, is_exact=dtype is torch.float16 or (dtype is torch.float32 and DEVICE.type == "cpu"))


class Norm(NamedNorm):
    """RMS norm of each head that reports its name."""

    def __init__(self, weight: Tensor, offset: float, eps: float = 1e-3) -> None:
        self._row_norm = RowNorm(weight, eps, offset)

    @property
    def row_norm(self) -> RowNorm:
        return self._row_norm

    def __call__(self, heads: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(heads.float(), heads.shape[-1:], eps=self.row_norm.eps)
        return ((self.row_norm.weight.float() + self.row_norm.offset) * normed).to(heads.dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms_of_heads_come_before_the_rotation(backend: str, dtype: torch.dtype, offset: float) -> None:
    """CU-1, CU-2: each head by itself, queries and keys with weights of their own; in the same launch."""
    one = case(dtype, channels=24)
    weights = torch.randn(2, 24, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    one.heads = one.heads._replace(norms=(Norm(weights[0], offset), Norm(weights[1], offset)))
    with watch() as launches:
        query = one.write()
    assert [launch.kernel for launch in launches] == list(COVERED) * (backend == triton.NAME)
    check(one, query, is_exact=backend != triton.NAME)
    one.heads = one.heads._replace(norms=(one.heads.norms[1], one.heads.norms[0]))
    with pytest.raises(AssertionError):
        check(one, query, is_exact=False)
    if backend == triton.NAME:
        with watch() as launches:
            one.heads = one.heads._replace(norms=(Norm(weights[0], offset), Norm(weights[1], offset, eps=0.5)))
            check(one, one.write(), is_exact=True)
        assert not launches


@pytest.mark.parametrize("gap", [0, 64, 5])
def test_blocks_may_lie_apart(backend: str, gap: int) -> None:
    """KV-3: keys, values and other layers share an arena, of which nothing else is written."""
    one, plain = case(), case()
    block = one.pools[0, 1, 0]
    arena = torch.full((BLOCKS, 2, 2, block.numel() + gap), torch.nan, device=DEVICE)
    one.pools = arena[..., : block.numel()].unflatten(-1, block.shape).permute(1, 2, 0, 3, 4, 5)
    with watch() as launches:
        query = one.write()
    assert torch.equal(query, plain.write())
    torch.testing.assert_close(one.pools, plain.pools, equal_nan=True, rtol=0, atol=0)
    assert arena[..., block.numel() :].isnan().all()
    assert [launch.kernel for launch in launches] == list(COVERED) * (backend == triton.NAME)


def test_blocks_beyond_two_billion_elements() -> None:
    """An arena may be larger than 32-bit offsets reach; only pages that hold a token are touched."""
    one, plain = case(torch.float16), case(torch.float16)
    block, stride = one.pools[0, 1, 0], 2**31 // 4 + 16
    arena = torch.empty((BLOCKS - 1) * stride + 2**20, dtype=block.dtype, device=DEVICE)
    strides = (2**18, 2**19, stride, *block.stride())
    one.pools = arena.as_strided(one.pools.shape, strides).copy_(one.pools)
    one.write()
    plain.write()
    torch.testing.assert_close(one.pools, plain.pools, equal_nan=True, rtol=0, atol=0)


def test_a_wrong_place_and_a_wrong_angle_are_seen() -> None:
    """Negative controls."""
    one = case()
    query = one.write([*SLOTS[:-1], 8])
    with pytest.raises(AssertionError):
        check(one, query, is_exact=False)
    one = case()
    query = one.write()
    assert one.rotation is not None
    one.rotation = Rotation(one.rotation.cos.roll(1, 0), one.rotation.sin.roll(1, 0))
    with pytest.raises(AssertionError):
        check(one, query, is_exact=False)


def test_one_launch_and_the_reference_where_there_is_none(backend: str) -> None:
    """CU-1, CU-3: the kernel needs blocks that are contiguous each."""
    one = case()
    with watch() as launches:
        one.write()
    assert [launch.kernel for launch in launches] == list(COVERED) * (backend == triton.NAME)
    one.pools = one.pools.transpose(4, 5).contiguous().transpose(4, 5)
    if backend == triton.NAME:
        with watch() as launches:
            check(one, one.write(), is_exact=True)
        assert not launches
