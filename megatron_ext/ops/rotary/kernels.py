"""Norms and rotation of queries and keys on a CUDA device, and writes of keys and values: all heads in one launch.

Results of a norm, and products before they are added, are rounded to the type of the rotated heads, as in plain torch.
"""

import triton
import triton.language as tl

from megatron_ext.ops.triton.kernel_registry import FLOATS, config, kernel

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
    strides="query_row query_group query_head key_row key_head value_row value_head block_stride token_stride "
    "head_size half",
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
