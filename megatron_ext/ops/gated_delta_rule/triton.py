"""Gated delta rule in Triton, for CUDA devices: reads and writes slots in place, with the kernels in `kernels.py`.

A slot of -1 marks a row or a sequence of padding: its outputs are zeros, and no slot is touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.gated_delta_rule import reference
from megatron_ext.ops.recurrence import RecurrenceBackend, decode_by_step, prefill_by_scan
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.triton.kernel_registry import Argument
from megatron_ext.ops.triton.launching import (
    is_aligned,
    launch_with,
    own_rows,
    prefill_arguments,
    rows_of,
    say_reference_computes,
    slot_tensor,
    tile_count,
)
from megatron_ext.ops.varlen import PackedChunks

MAX_KEYS = 128
SCALES = ("key_lengths", "reads", "asks", "writes", "fades")
"""Results of `delta_tiles` for each token and head, [T, H] each."""


def _lacks(q: Tensor, k: Tensor, v: Tensor, live: Tensor) -> str | None:
    """Return why there is no kernel for these inputs; None if there is one."""
    from megatron_ext.ops.gated_delta_rule import kernels

    if q.shape[-1] > MAX_KEYS:
        return f"the gated delta rule has no kernel for keys of {q.shape[-1]} channels, only for up to {MAX_KEYS}"
    if q.shape[-1] > kernels.MAX_ODD_KEYS and not is_aligned(q, k, v):
        return (
            f"the gated delta rule has no kernel for {q.shape[-1]} and {v.shape[-1]} channels, only for multiples of 16"
        )
    if q.dtype != v.dtype:
        return f"the gated delta rule has no kernel for keys of {q.dtype} and values of {v.dtype}"
    if not own_rows(live):
        return "the gated delta rule has no kernel for states that are not contiguous"
    return kernels.delta_prefill.lacks(T=q.dtype, S=live.dtype)


def _arguments(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalize: bool) -> dict[str, Argument]:
    """Return the kernels' arguments by parameter name."""
    q, k, v, g, beta = (rows_of(t) for t in (q, k, v, g.float(), beta.float()))
    (heads, value_dim), (groups, key_dim) = v.shape[1:], k.shape[1:]
    strides = {f"{name}_row": t.stride(0) for name, t in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "y": torch.empty(v.shape, dtype=v.dtype, device=v.device),
        **strides,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "heads": heads,
        "heads_per_group": heads // groups,
        "normalize": int(normalize),
        "scale": key_dim**-0.5,
    }


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunks: PackedChunks,
    slots: StateSlots,
    live: Tensor,
    snapshots: Tensor | None,
    normalize: bool = False,
) -> Tensor:
    """Compute `Recurrence.prefill` for the inputs of `reference.gated_delta_scan`."""
    lack = _lacks(q, k, v, live)
    if lack is not None:
        say_reference_computes(lack)
        inputs, options = (q, k, v, g, beta), {"normalize": normalize}
        return prefill_by_scan(reference.gated_delta_scan, inputs, chunks, slots, live, snapshots, options)
    from megatron_ext.ops.gated_delta_rule import kernels

    tiling, config = kernels.delta_tiles.fitting(q.dtype), kernels.delta_prefill.fitting(q.dtype, K=k.shape[2])
    assert tiling is not None, "there are kernels"
    assert config is not None, "of this size"
    (tokens, heads, value_dim), sequences, tile = v.shape, slots.live.numel(), config["TILE"]
    solved, mixed = torch.empty(2, tokens, heads, tile, dtype=torch.float32, device=v.device)
    scales = torch.empty(len(SCALES), tokens, heads, dtype=torch.float32, device=v.device)
    arguments = _arguments(q, k, v, g, beta, normalize) | prefill_arguments(chunks, slots, live, snapshots)
    arguments |= {"solved": solved, "mixed": mixed, **dict(zip(SCALES, scales, strict=True))}
    arguments["sequences"] = sequences
    y = arguments["y"]
    assert isinstance(y, Tensor)
    y.zero_()  # rows after the last sequence; a decode writes every row
    launch_with(kernels.delta_tiles, (tile_count(tokens, sequences, 1, tile), heads), tiling, arguments)
    launch_with(kernels.delta_prefill, (sequences, heads, -(-value_dim // config["V"])), config, arguments)
    return y


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    slots: Tensor | slice,
    live: Tensor,
    normalize: bool = False,
) -> Tensor:
    """Compute `Recurrence.decode` for the inputs of `reference.gated_delta_step`."""
    lack = _lacks(q, k, v, live)
    if lack is not None:
        say_reference_computes(lack)
        inputs, options = (q, k, v, g, beta), {"normalize": normalize}
        return decode_by_step(reference.gated_delta_step, inputs, slots, live, options)
    from megatron_ext.ops.gated_delta_rule import kernels

    arguments = _arguments(q, k, v, g, beta, normalize)
    rows, heads, value_dim = v.shape
    arguments |= {"live": live, "live_row": live.stride(0), "slots": slot_tensor(slots, rows, v.device)}
    config = kernels.delta_decode.fitting(q.dtype, K=k.shape[2])
    assert config is not None, "there is one"
    launch_with(kernels.delta_decode, (rows, heads, -(-value_dim // config["V"])), config, arguments)
    y = arguments["y"]
    assert isinstance(y, Tensor)
    return y


BACKEND = RecurrenceBackend(
    triton.NAME, triton.takes, reference.gated_delta_scan, reference.gated_delta_step, prefill=prefill, decode=decode
)
