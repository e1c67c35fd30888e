"""Norms and rotation of queries and keys on a CUDA device, and writes of keys and values: all heads in one launch.

Results of a norm, and products before they are added, are rounded to the type of the rotated heads, as in plain torch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.gated_norm import NamedNorm
from megatron_ext.ops.rotary import Heads, Rotation
from megatron_ext.ops.triton.kernel_registry import FLOATS, Argument, config, kernel
from megatron_ext.ops.triton.launching import own_rows, require_one_type

BY_CHANNELS = tuple(config(num_warps=warps, HEADS=8, CHANNELS=n) for warps, n in ((1, 64), (2, 128), (4, 256)))


@triton.jit
def normed(values, weight, channel, is_channel, scale, has_norm, offset, states):
    """Multiply channels of heads [HEADS, CHANNELS] by the scale of each head and the channel weights."""
    weights = tl.load(weight + channel, mask=is_channel & (has_norm != 0), other=1.0).to(tl.float32) + offset
    found = (values * scale[:, None] * weights[None, :]).to(states.dtype.element_ty).to(tl.float32)
    return tl.where(has_norm != 0, found, values)


@triton.jit
def rotated(
    source, states, weight, is_head, cos, sin, head_size, half, has_norm, eps, offset,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return heads of one token, [HEADS, CHANNELS] fp32, normalized, with the first 2 * half channels rotated in pairs.

    `source` [HEADS] points to the heads, `cos` and `sin` to the token's values.
    """
    channel = tl.arange(0, CHANNELS)
    is_channel, is_first = channel < head_size, channel < half
    is_turned = channel < 2 * half
    other = tl.where(is_first, channel + half, channel - half)
    angle = tl.where(is_first, channel, channel - half)
    is_real, is_pair = is_head[:, None] & is_channel[None, :], is_head[:, None] & is_turned[None, :]
    own = tl.load(source[:, None] + channel[None, :], mask=is_real, other=0.0).to(tl.float32)
    pair = tl.load(source[:, None] + other[None, :], mask=is_pair, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(own * own, 1) / head_size + eps)
    own = normed(own, weight, channel, is_channel, scale, has_norm, offset, states)
    pair = normed(pair, weight, other, is_turned, scale, has_norm, offset, states)
    c = tl.load(cos + angle, mask=is_turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)
    first = (own * c[None, :]).to(states.dtype.element_ty).to(tl.float32)
    second = (pair * s[None, :]).to(states.dtype.element_ty).to(tl.float32)
    return tl.where(is_turned[None, :], tl.where(is_first[None, :], first - second, first + second), own)


@kernel(
    pointers={"T": "query key value query_weight key_weight cos sin out key_cache value_cache", "i64": "slots"},
    counts="tokens query_heads shared key_heads block_size has_norm",
    scalars="eps offset",
    types=[{"T": name} for name in FLOATS],
    configs=BY_CHANNELS,
)
def rotate_and_write(
    query, key, value, query_weight, key_weight, cos, sin, out, key_cache, value_cache, slots, query_row, query_group,
    query_head, key_row, key_head, value_row, value_head, block_stride, token_stride, head_size, half, tokens,
    query_heads, shared, key_heads, block_size, has_norm, eps, offset,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Process some heads of one token; the grid is (rows, tiles of query heads, then key heads, then value heads).

    Rows from `tokens` on have queries only. out [rows, query_heads, head_size].
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += row * half
    sin += row * half
    channel = tl.arange(0, CHANNELS)
    query_tiles, key_tiles = tl.cdiv(query_heads, HEADS), tl.cdiv(key_heads, HEADS)
    if tile < query_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        source = query + row * query_row + (head // shared) * query_group + (head % shared) * query_head
        is_head, norm = head < query_heads, query_weight
        values = rotated(source, query, norm, is_head, cos, sin, head_size, half, has_norm, eps, offset, CHANNELS)
        target = out + (row * query_heads + head)[:, None] * head_size + channel[None, :]
        is_real = (head < query_heads)[:, None] & (channel < head_size)[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=is_real)
    elif row < tokens:
        is_key = tile < query_tiles + key_tiles
        head = (tile - query_tiles - tl.where(is_key, 0, key_tiles)) * HEADS + tl.arange(0, HEADS)
        is_real = (head < key_heads)[:, None] & (channel < head_size)[None, :]
        slot = tl.load(slots + row)
        start = slot // block_size * block_stride + slot % block_size * token_stride
        place = start + head[:, None] * head_size + channel[None, :]
        if is_key:
            source = key + row * key_row + head * key_head
            is_head, norm = head < key_heads, key_weight
            keys = rotated(source, key, norm, is_head, cos, sin, head_size, half, has_norm, eps, offset, CHANNELS)
            tl.store(key_cache + place, keys.to(key_cache.dtype.element_ty), mask=is_real)
        else:
            own = value + row * value_row + (head * value_head)[:, None] + channel[None, :]
            tl.store(value_cache + place, tl.load(own, mask=is_real, other=0.0), mask=is_real)


def _require(heads: Heads, rotation: Rotation | None, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise `NoKernelError` unless a kernel supports these inputs."""
    cos = None if rotation is None else rotation.cos
    require_one_type("rotary writing", heads.key, heads.query, heads.value, key_cache, value_cache, cos)
    if not own_rows(key_cache) or key_cache.stride() != value_cache.stride():
        raise NoKernelError("rotary writes have no kernel for keys and values with different layouts")
    most, channels = BY_CHANNELS[-1]["CHANNELS"], heads.key.shape[-1]
    if channels > most or any(one.stride(-1) != 1 for one in (heads.query, heads.key, heads.value)):
        raise NoKernelError(
            f"rotary writes have kernels for heads of up to {most} contiguous channels, not of {channels}"
        )
    rotate_and_write.require(T=heads.key.dtype)


def _norms(heads: Heads) -> dict[str, Argument]:
    """Return the weights of both norms and their shared parameters; stand-ins for missing weights are not read.

    Raises:
        NoKernelError: There is no kernel for such norms.
    """
    if heads.norms is None:
        return {"query_weight": heads.key, "key_weight": heads.key, "has_norm": 0, "eps": 1.0, "offset": 0.0}
    given: tuple[object, ...] = heads.norms
    norms = [norm.row_norm for norm in given if isinstance(norm, NamedNorm)]
    if len(norms) != len(given):
        raise NoKernelError("rotary writes have no kernel for norms other than RMS norms")
    wanted = heads.key.dtype, heads.key.shape[-1]
    weights = [norm.weight for norm in norms if norm.weight is not None]
    are_plain = len(weights) == len(norms) and all((one.dtype, one.numel()) == wanted for one in weights)
    if not are_plain or len({(norm.eps, norm.offset) for norm in norms}) > 1:
        raise NoKernelError("rotary writes have no kernel for norms of such weights")
    query, key = (weight.contiguous() for weight in weights)
    return {"query_weight": query, "key_weight": key, "has_norm": 1, "eps": norms[0].eps, "offset": norms[0].offset}


def launch_rotate_and_write(
    heads: Heads, rotation: Rotation | None, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> Tensor:
    _require(heads, rotation, key_cache, value_cache)
    query, key, value, _ = heads
    rows, groups, shared, channels = query.shape
    config = next(one for one in BY_CHANNELS if one["CHANNELS"] >= channels)
    norms, key_tiles = _norms(heads), -(-key.shape[1] // config["HEADS"])
    out = query.new_empty(rows, groups * shared, channels)
    rotate_and_write.launch(
        (rows, -(-groups * shared // config["HEADS"]) + 2 * key_tiles),
        config,
        query=query,
        key=key,
        value=value,
        cos=query if rotation is None else rotation.cos.contiguous(),  # the stand-in for None is not read
        sin=query if rotation is None else rotation.sin.contiguous(),
        half=0 if rotation is None else rotation.cos.shape[-1],
        out=out,
        key_cache=key_cache,
        value_cache=value_cache,
        slots=slots.contiguous(),
        query_row=query.stride(0),
        query_group=query.stride(1),
        query_head=query.stride(2),
        key_row=key.stride(0),
        key_head=key.stride(1),
        value_row=value.stride(0),
        value_head=value.stride(1),
        block_stride=key_cache.stride(0),
        token_stride=key_cache.stride(1),
        head_size=channels,
        tokens=len(slots),
        query_heads=groups * shared,
        shared=shared,
        key_heads=key.shape[1],
        block_size=key_cache.shape[1],
        **norms,
    )
    return out
