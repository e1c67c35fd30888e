"""Rotation and writes of keys and values in Triton, for CUDA devices: one launch, with the kernel in `kernels.py`."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import FunctionBackend, NoKernelError
from megatron_ext.ops.gated_norm import NamedNorm, RowNorm
from megatron_ext.ops.rotary.reference import HeadNorms, Heads, Rotation
from megatron_ext.ops.triton.launching import own_rows, require_one_type


def _require(heads: Heads, rotation: Rotation | None, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raise `NoKernelError` unless a kernel supports these inputs."""
    from megatron_ext.ops.rotary import kernels

    cos = None if rotation is None else rotation.cos
    require_one_type("rotary writing", heads.key, heads.query, heads.value, key_cache, value_cache, cos)
    if not own_rows(key_cache) or key_cache.stride() != value_cache.stride():
        raise NoKernelError("rotary writes have no kernel for keys and values with different layouts")
    most, channels = kernels.BY_CHANNELS[-1]["CHANNELS"], heads.key.shape[-1]
    if channels > most or any(one.stride(-1) != 1 for one in (heads.query, heads.key, heads.value)):
        raise NoKernelError(
            f"rotary writes have kernels for heads of up to {most} contiguous channels, not of {channels}"
        )
    if heads.norms is not None:
        _require_norms(heads.key, heads.norms)
    kernels.rotate_and_write.require(T=heads.key.dtype)


def _require_norms(keys: Tensor, norms: HeadNorms) -> None:
    """Raise `NoKernelError` unless a kernel supports norms of these heads."""
    if not all(isinstance(one, NamedNorm) for one in norms):
        raise NoKernelError("rotary writes have no kernel for norms other than RMS norms")
    query, key = _row_norms(norms)
    are_alike = (query.eps, query.offset) == (key.eps, key.offset)
    wanted = keys.dtype, keys.shape[-1]
    are_plain = all(one.weight is not None and (one.weight.dtype, one.weight.numel()) == wanted for one in (query, key))
    if not (are_alike and are_plain):
        raise NoKernelError("rotary writes have no kernel for norms of such weights")


def _row_norms(norms: HeadNorms) -> tuple[RowNorm, RowNorm]:
    """Return the parameters of both norms."""
    query, key = norms
    assert isinstance(query, NamedNorm)
    assert isinstance(key, NamedNorm)
    return query.row_norm, key.row_norm


def _norm_arguments(heads: Heads) -> dict[str, Tensor | int | float]:
    """Return the weights of both norms and their shared parameters; stand-ins for missing weights are not read."""
    if heads.norms is None:
        return {"query_weight": heads.key, "key_weight": heads.key, "has_norm": 0, "eps": 1.0, "offset": 0.0}
    query, key = _row_norms(heads.norms)
    assert query.weight is not None
    assert key.weight is not None
    weights = {"query_weight": query.weight.contiguous(), "key_weight": key.weight.contiguous()}
    return weights | {"has_norm": 1, "eps": query.eps, "offset": query.offset}


def rotate_and_write(
    heads: Heads, rotation: Rotation | None, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> Tensor:
    _require(heads, rotation, key_cache, value_cache)
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
        block_size=key_cache.shape[1],
        block_stride=key_cache.stride(0),
        token_stride=key_cache.stride(1),
        head_size=channels,
        **_norm_arguments(heads),
        **_rotation(rotation, query),
        **_strides(query, key, value),
    )
    return out


def _rotation(rotation: Rotation | None, query: Tensor) -> dict[str, Tensor | int]:
    """Return cosines, sines and half the number of rotated channels; stand-ins for a missing rotation are not read."""
    if rotation is None:
        return {"cos": query, "sin": query, "half": 0}
    return {
        "cos": rotation.cos.contiguous(),
        "sin": rotation.sin.contiguous(),
        "half": rotation.cos.shape[-1],
    }


def _strides(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    """Return the strides between tokens, groups and heads."""
    row, group, head, _ = query.stride()
    found = {"query_row": row, "query_group": group, "query_head": head}
    for name, one in (("key", key), ("value", value)):
        found |= {f"{name}_row": one.stride(0), f"{name}_head": one.stride(1)}
    return found


BACKEND = FunctionBackend(triton.NAME, triton.takes, rotate_and_write)
