"""Gathers of single tokens' keys or values from a pool whose blocks may lie apart."""

from __future__ import annotations

import math

from torch import Tensor


def gather_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Return the keys or values at places of a pool, [..., Hkv, D].

    Args:
        cache: [NB, B, Hkv, D]; blocks may lie any distance apart, the tokens of a block are evenly spaced.
        slots: [...] int64, block * B + offset.
    """
    (blocks, size), (block_stride, token_stride, *inner) = cache.shape[:2], cache.stride()
    unit = math.gcd(block_stride, token_stride)  # every token begins at a multiple of it
    count = ((blocks - 1) * block_stride + (size - 1) * token_stride) // unit + 1
    between = block_stride - size * token_stride
    rows = slots.flatten()
    if between or unit != token_stride:
        rows = rows * (token_stride // unit) + rows // size * (between // unit)
    flat = cache.as_strided((count, *cache.shape[2:]), (unit, *inner))
    return flat.index_select(0, rows).unflatten(0, slots.shape)
