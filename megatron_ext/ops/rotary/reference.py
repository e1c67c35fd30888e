"""Rotation and writes of keys and values in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.ops.backends import anything
from megatron_ext.ops.rotary.rotation import Rotation, rotate

HeadNorms = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Heads:
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


@dataclass(frozen=True)
class RotaryBackend:
    """Backend that rotates and writes; `write` has the signature of `rotate_and_write`."""

    name: str
    takes: Callable[[Tensor], bool]
    write: Callable[..., Tensor]


def rotate_and_write(
    heads: Heads, rotation: Rotation | None, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> Tensor:
    query, key = heads.query.flatten(1, 2), heads.key
    if heads.norms is not None:
        query, key = (norm(one.unsqueeze(1)).squeeze(1) for norm, one in zip(heads.norms, (query, key), strict=True))
    if rotation is not None:
        query, key = (rotate(one.unsqueeze(1), rotation).squeeze(1) for one in (query, key))
    places = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for cache, states in ((key_cache, key), (value_cache, heads.value)):
        cache.index_put_(places, states[: len(slots)])
    return query


BACKEND = RotaryBackend("reference", anything, rotate_and_write)
