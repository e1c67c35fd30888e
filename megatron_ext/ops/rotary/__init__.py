"""Rotary position embeddings of packed tokens, and writes of their keys and values to the blocks of the cache."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.rotary import reference, triton
from megatron_ext.ops.rotary.reference import Heads, Rotation, rotate, rotation_at

ROTARY_WRITE = Backends("rotary_write", triton.BACKEND, reference.BACKEND)


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
    return ROTARY_WRITE.compute(
        heads.key, lambda backend: backend.function(heads, rotation, key_cache, value_cache, slots)
    )


__all__ = ["ROTARY_WRITE", "Heads", "Rotation", "rotate", "rotate_and_write", "rotation_at"]
