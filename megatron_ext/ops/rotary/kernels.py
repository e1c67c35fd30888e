"""Rotation of queries and keys on a CUDA device, and writes of keys and values into blocks: all heads in one launch.

Products are rounded to the type of what is rotated before they are added, as they are in plain torch.
"""

import triton
import triton.language as tl

from megatron_ext.ops.triton.registry import FLOATS, config, kernel

BY_CHANNELS = tuple(config(num_warps=warps, HEADS=8, CHANNELS=n) for warps, n in ((1, 64), (2, 128), (4, 256)))


@triton.jit
def rotated(source, states, is_head, cos, sin, head_size, half, CHANNELS: tl.constexpr):
    """Heads of one token, [HEADS, CHANNELS] fp32: the first 2 * half channels of each turned, in pairs of channels.

    `source` [HEADS] says where heads begin, `cos` and `sin` where the token's are.
    """
    channel = tl.arange(0, CHANNELS)
    is_real, is_first = is_head[:, None] & (channel < head_size)[None, :], channel < half
    is_turned = channel < 2 * half
    other = tl.where(is_first, channel + half, channel - half)
    angle = tl.where(is_first, channel, channel - half)
    own = tl.load(source[:, None] + channel[None, :], mask=is_real, other=0.0).to(tl.float32)
    pair = tl.load(source[:, None] + other[None, :], mask=is_real & is_turned[None, :], other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=is_turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)
    first = (own * c[None, :]).to(states.dtype.element_ty).to(tl.float32)
    second = (pair * s[None, :]).to(states.dtype.element_ty).to(tl.float32)
    return tl.where(is_turned[None, :], tl.where(is_first[None, :], first - second, first + second), own)


@kernel(
    pointers={"T": "query key value cos sin out key_cache value_cache", "i64": "slots"},
    strides="query_row query_group query_head key_row key_head value_row value_head token_stride head_size half",
    counts="tokens query_heads shared key_heads",
    types=[{"T": name} for name in FLOATS],
    configs=BY_CHANNELS,
)
def rotate_and_write(
    query, key, value, cos, sin, out, key_cache, value_cache, slots, query_row, query_group, query_head, key_row,
    key_head, value_row, value_head, token_stride, head_size, half, tokens, query_heads, shared, key_heads,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; the grid is (rows, tiles of query heads, then of key heads, then of value heads).

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
        values = rotated(source, query, head < query_heads, cos, sin, head_size, half, CHANNELS)
        target = out + (row * query_heads + head)[:, None] * head_size + channel[None, :]
        is_real = (head < query_heads)[:, None] & (channel < head_size)[None, :]
        tl.store(target, values.to(out.dtype.element_ty), mask=is_real)
    elif row < tokens:
        is_key = tile < query_tiles + key_tiles
        head = (tile - query_tiles - tl.where(is_key, 0, key_tiles)) * HEADS + tl.arange(0, HEADS)
        is_real = (head < key_heads)[:, None] & (channel < head_size)[None, :]
        place = tl.load(slots + row) * token_stride + head[:, None] * head_size + channel[None, :]
        if is_key:
            source = key + row * key_row + head * key_head
            keys = rotated(source, key, head < key_heads, cos, sin, head_size, half, CHANNELS)
            tl.store(key_cache + place, keys.to(key_cache.dtype.element_ty), mask=is_real)
        else:
            own = value + row * value_row + (head * value_head)[:, None] + channel[None, :]
            tl.store(value_cache + place, tl.load(own, mask=is_real, other=0.0), mask=is_real)
