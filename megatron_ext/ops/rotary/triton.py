"""Rotation and writes of keys and values in Triton, for CUDA devices: one launch. `kernels.py` computes."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.rotary import reference
from megatron_ext.ops.rotary.reference import Heads, RotaryBackend
from megatron_ext.ops.rotary.rotation import Rotation
from megatron_ext.ops.triton.places import own_rows, say_reference_computes


def _lacks(heads: Heads, rotation: Rotation | None, key_cache: Tensor, value_cache: Tensor) -> str | None:
    """Why there is no kernel for these; None if there is one."""
    from megatron_ext.ops.rotary import kernels

    others = (heads.query, heads.value, key_cache, value_cache, *(() if rotation is None else (rotation.cos,)))
    different = [one.dtype for one in others if one.dtype != heads.key.dtype]
    if different:
        return f"rotary writes have no kernel for {heads.key.dtype} and {different[0]}"
    if not (own_rows(key_cache) and own_rows(value_cache) and _follow(key_cache) and _follow(value_cache)):
        return "rotary writes have no kernel for keys and values whose blocks do not follow each other"
    most, channels = kernels.BY_CHANNELS[-1]["CHANNELS"], heads.key.shape[-1]
    if channels > most or any(one.stride(-1) != 1 for one in (heads.query, heads.key, heads.value)):
        return f"rotary writes have no kernel for heads of {channels} channels, but for {most} that follow each other"
    return kernels.rotate_and_write.lacks(T=heads.key.dtype)


def _follow(cache: Tensor) -> bool:
    """Whether blocks [blocks, B, Hkv, D], each in one piece, follow each other."""
    return len(cache) < 2 or cache.stride(0) == cache[0].numel()


def rotate_and_write(
    heads: Heads, rotation: Rotation | None, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> Tensor:
    """See the package."""
    lack = _lacks(heads, rotation, key_cache, value_cache)
    if lack is not None:
        say_reference_computes(lack)
        return reference.rotate_and_write(heads, rotation, key_cache, value_cache, slots)
    from megatron_ext.ops.rotary import kernels

    query, key, value = heads.query, heads.key, heads.value
    rows, groups, shared, channels = query.shape
    config = next(one for one in kernels.BY_CHANNELS if one["CHANNELS"] >= channels)
    out, key_tiles = query.new_empty(rows, groups * shared, channels), -(-key.shape[1] // config["HEADS"])
    kernels.rotate_and_write.launch(
        (rows, -(-groups * shared // config["HEADS"]) + 2 * key_tiles),
        config,
        query=query,
        key=key,
        value=value,
        out=out,
        key_cache=key_cache,
        value_cache=value_cache,
        slots=slots.contiguous(),
        tokens=len(slots),
        query_heads=groups * shared,
        shared=shared,
        key_heads=key.shape[1],
        token_stride=key_cache.shape[2] * channels,
        head_size=channels,
        **_rotation(rotation, query),
        **_strides(query, key, value),
    )
    return out


def _rotation(rotation: Rotation | None, query: Tensor) -> dict[str, Tensor | int]:
    """Cosines and sines, and half of the channels that are turned; what stands for none is not read."""
    if rotation is None:
        return {"cos": query, "sin": query, "half": 0}
    return {
        "cos": rotation.cos.contiguous(),
        "sin": rotation.sin.contiguous(),
        "half": rotation.cos.shape[-1],
    }


def _strides(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    """From token to token, from group to group, from head to head."""
    row, group, head, _ = query.stride()
    found = {"query_row": row, "query_group": group, "query_head": head}
    for name, one in (("key", key), ("value", value)):
        found |= {f"{name}_row": one.stride(0), f"{name}_head": one.stride(1)}
    return found


BACKEND = RotaryBackend(triton.NAME, triton.takes, rotate_and_write)
