"""Rotary position embeddings of packed tokens, and writes of their keys and values to the blocks of the cache.

Cosines and sines are computed once for all layers of a step. Channel i < n/2 and channel i + n/2 of the first n
channels of a head are a pair that is rotated by one angle; later channels are unchanged. This is the layout of
megatron-core without `rotary_interleaved`, and of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import Operator

ROTARY_WRITE = Operator("rotary_write", triton.backend(__name__))
HeadNorms = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of each token's angles, times a magnitude, [T, 1, 1, n/2] each."""

    cos: Tensor
    sin: Tensor


def rotation_at(angles: Tensor, positions: Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> Rotation:
    """Return the rotation of each token.

    Args:
        angles: [positions, 1, 1, n] as megatron-core's `RotaryEmbedding` gives it: both halves are the same.
        positions: [T] int64.
        dtype: Type of the result; the angles keep their own type until then.
        magnitude: Factor of the rotated channels.
    """
    chosen = angles[..., : angles.shape[-1] // 2][positions]
    cos, sin = chosen.cos(), chosen.sin()
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    return Rotation(cos.to(dtype), sin.to(dtype))


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first n channels of [T, 1, heads, D], where D >= n."""
    cos, sin, half = rotation.cos, rotation.sin, rotation.cos.shape[-1]
    first, second, rest = states.split([half, half, states.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Heads(NamedTuple):
    """Queries, keys and values of T tokens from a layer's projection; mostly views of it.

    Attributes:
        query: [T, G, J, D], J query heads of each of G groups.
        key: [T, Hkv, D].
        value: [T, Hkv, D].
        norms: Norms of each query head and each key head before rotation, [..., D] -> [..., D]; None for no norms.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    norms: HeadNorms | None = None


@ROTARY_WRITE
def rotate_and_write(
    heads: Heads, rotation: Rotation | None, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> Tensor:
    """Rotate queries and keys, and write keys and values to the cache.

    Args:
        heads: Heads of T tokens.
        rotation: Rotation of each token; None leaves queries and keys unchanged.
        key_cache: [blocks, B, Hkv, D], written in place; blocks may lie any distance apart.
        value_cache: [blocks, B, Hkv, D], likewise.
        slots: [t] int64, block * B + offset of each of the first t tokens; later tokens are padding, whose keys and
            values are not written.

    Returns:
        Queries [T, Hq, D].
    """
    query, key = heads.query.flatten(1, 2), heads.key
    if heads.norms is not None:
        query, key = (norm(one.unsqueeze(1)).squeeze(1) for norm, one in zip(heads.norms, (query, key), strict=True))
    if rotation is not None:
        query, key = (rotate(one.unsqueeze(1), rotation).squeeze(1) for one in (query, key))
    places = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for cache, states in ((key_cache, key), (value_cache, heads.value)):
        cache.index_put_(places, states[: len(slots)])
    return query
