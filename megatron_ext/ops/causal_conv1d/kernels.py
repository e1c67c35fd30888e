"""Convolution kernels on a CUDA device: outputs of a prefill, the states after it, and one token of each request.

A token's sum starts with the bias and runs from the oldest input to its own, wherever those come from: its bits depend
neither on where a sequence is cut nor on what else the step computes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.triton.device import store_kept
from megatron_ext.ops.triton.kernel_registry import MAX_REGISTERS, STATE_TYPES, Argument, Kernel, config, kernel
from megatron_ext.ops.triton.launching import decode_arguments, prefill_arguments, require_states, rowed

WINDOWS = (2, 3, 4)


@kernel(
    pointers={"T": "x weight bias y", "S": "live", "i64": "seq_idx cu_seqlens slots", "i1": "has_initial"},
    counts="rows sequences has_bias activate",
    types=STATE_TYPES,
    configs=[config(registers=MAX_REGISTERS, WINDOW=window, ROWS=8, CHANNELS=128) for window in WINDOWS],
)
def conv_prefill(
    x, weight, bias, y, live, seq_idx, cu_seqlens, slots, has_initial, x_row, live_row, channels, rows, sequences,
    has_bias, activate,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute outputs [rows, channels] of the packed sequences, zero after the last one. States are only read."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    is_token = row < tl.load(cu_seqlens + sequences)
    sequence = tl.load(seq_idx + row, mask=is_token, other=0)
    begin = tl.load(cu_seqlens + sequence)
    state = live + tl.load(slots + sequence) * live_row
    has_state = is_token & tl.load(has_initial + sequence).to(tl.int1)
    total = tl.load(bias + channel, mask=is_channel & (has_bias != 0), other=0.0).to(tl.float32)
    total = tl.broadcast_to(total[None, :], (ROWS, CHANNELS))
    for k in tl.static_range(WINDOW):
        source = row + (k - WINDOW + 1)
        is_new = is_token & (source >= begin)
        is_old = has_state & (source < begin)
        new = tl.load(x + source[:, None] * x_row + channel[None, :], mask=is_new[:, None] & is_channel, other=0.0)
        column = source - begin + (WINDOW - 1)
        place = state[:, None] + channel[None, :] * (WINDOW - 1) + column[:, None]
        old = tl.load(place, mask=is_old[:, None] & is_channel, other=0.0).to(tl.float32)
        inputs = new.to(tl.float32) + old.to(x.dtype.element_ty).to(tl.float32)
        tap = tl.load(weight + channel * WINDOW + k, mask=is_channel, other=0.0).to(tl.float32)
        total += inputs * tap[None, :]
    total = tl.where(activate != 0, total * tl.sigmoid(total), total)
    total = tl.where(is_token[:, None], total, 0.0)
    is_output = (row < rows)[:, None] & is_channel
    tl.store(y + row[:, None] * channels + channel[None, :], total.to(y.dtype.element_ty), mask=is_output)


@triton.jit
def _last_inputs(x, state, x_row, channel, begin, after, has_state, is_place, WINDOW: tl.constexpr, KEPT: tl.constexpr):
    """Return the WINDOW - 1 inputs before token `after` of the packed axis, [channels, KEPT], in fp32."""
    source = after - (WINDOW - 1) + tl.arange(0, KEPT)
    is_new = is_place & (source >= begin)[None, :]
    is_old = is_place & (source < begin)[None, :] & has_state
    new = tl.load(x + source[None, :] * x_row + channel[:, None], mask=is_new, other=0.0).to(tl.float32)
    column = source - begin + (WINDOW - 1)
    old = tl.load(state + channel[:, None] * (WINDOW - 1) + column[None, :], mask=is_old, other=0.0)
    return new + old.to(tl.float32)


@kernel(
    pointers={
        "T": "x",
        "S": "live snapshots",
        "i64": "cu_seqlens slots kept_slots kept_offsets kept_tokens",
        "i1": "has_initial",
    },
    counts="kept",
    types=STATE_TYPES,
    configs=[
        config(registers=MAX_REGISTERS, WINDOW=window, KEPT=triton.next_power_of_2(window - 1), CHANNELS=128)
        for window in WINDOWS
    ],
)
def conv_states(
    x, live, snapshots, cu_seqlens, slots, kept_slots, kept_offsets, kept_tokens, has_initial, x_row, live_row,
    snapshot_row, channels, kept,
    WINDOW: tl.constexpr, KEPT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write a sequence's kept states, then its final state; no other program reads its slot any more."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    begin = tl.load(cu_seqlens + sequence)
    end = tl.load(cu_seqlens + sequence + 1)
    if (slot >= 0) & (begin < end):
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        column = tl.arange(0, KEPT)
        is_place = (channel < channels)[:, None] & (column < WINDOW - 1)[None, :]
        place = channel[:, None] * (WINDOW - 1) + column[None, :]
        has_state = tl.load(has_initial + sequence).to(tl.int1)
        state = live + slot * live_row
        last = tl.minimum(tl.load(kept_offsets + sequence + 1), kept)
        for i in range(tl.load(kept_offsets + sequence), last):
            after = tl.load(kept_tokens + i)
            columns = _last_inputs(
                x, state, x_row, channel, begin, after, has_state, is_place, WINDOW=WINDOW, KEPT=KEPT
            )
            store_kept(snapshots, snapshot_row, columns, place, is_place, kept_slots, i)
        columns = _last_inputs(x, state, x_row, channel, begin, end, has_state, is_place, WINDOW=WINDOW, KEPT=KEPT)
        tl.debug_barrier()  # read all of a short sequence's old columns before writing one
        tl.store(state + place, columns.to(live.dtype.element_ty), mask=is_place)


@kernel(
    pointers={"T": "x weight bias y", "S": "live", "i64": "slots"},
    counts="has_bias activate",
    types=STATE_TYPES,
    configs=[
        config(registers=MAX_REGISTERS, WINDOW=window, KEPT=triton.next_power_of_2(window - 1), CHANNELS=128)
        for window in WINDOWS
    ],
)
def conv_decode(
    x, weight, bias, y, live, slots, x_row, live_row, channels, has_bias, activate,
    WINDOW: tl.constexpr, KEPT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Convolve one token of a request and shift its columns by one; a padding row becomes zero and touches no slot."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    slot = tl.load(slots + row)
    if slot < 0:
        tl.store(y + row * channels + channel, tl.zeros((CHANNELS,), y.dtype.element_ty), mask=is_channel)
    else:
        state = live + slot * live_row
        total = tl.load(bias + channel, mask=is_channel & (has_bias != 0), other=0.0).to(tl.float32)
        for k in tl.static_range(WINDOW - 1):
            old = tl.load(state + channel * (WINDOW - 1) + k, mask=is_channel, other=0.0).to(tl.float32)
            tap = tl.load(weight + channel * WINDOW + k, mask=is_channel, other=0.0).to(tl.float32)
            total += old.to(x.dtype.element_ty).to(tl.float32) * tap
        own = tl.load(x + row * x_row + channel, mask=is_channel, other=0.0).to(tl.float32)
        tap = tl.load(weight + channel * WINDOW + WINDOW - 1, mask=is_channel, other=0.0).to(tl.float32)
        total += own * tap
        total = tl.where(activate != 0, total * tl.sigmoid(total), total)
        tl.store(y + row * channels + channel, total.to(y.dtype.element_ty), mask=is_channel)
        column = tl.arange(0, KEPT)
        is_place = is_channel[:, None] & (column < WINDOW - 1)[None, :]
        is_moved = is_channel[:, None] & (column < WINDOW - 2)[None, :]
        place = state + channel[:, None] * (WINDOW - 1) + column[None, :]
        moved = tl.load(place + 1, mask=is_moved, other=0.0).to(tl.float32)
        moved = tl.where((column == WINDOW - 2)[None, :], own[:, None], moved)
        tl.debug_barrier()  # read all columns before writing one
        tl.store(place, moved.to(live.dtype.element_ty), mask=is_place)


def _arguments(x: Tensor, weight: Tensor, bias: Tensor | None, live: Tensor, activate: bool) -> dict[str, Argument]:
    """Return the arguments of the inputs; the stand-in for a missing bias is not read.

    Raises:
        NoKernelError: There is no kernel for them.
    """
    window, weight = weight.shape[1], weight.contiguous()
    if window not in WINDOWS:
        raise NoKernelError(f"the convolution has no kernel for a window of {window}, only for {WINDOWS}")
    require_states(conv_prefill, live, x, weight, bias)
    return rowed(x=x) | {
        "weight": weight,
        "bias": weight if bias is None else bias.contiguous(),
        "has_bias": int(bias is not None),
        "activate": int(activate),
        "rows": x.shape[0],
        "channels": x.shape[1],
    }


def _launch(kernel: Kernel, count: int, given: dict[str, Argument], weight: Tensor, unit: str = "") -> None:
    """Launch for `count` rows or sequences, in blocks of the constant `unit` if it is given."""
    config = next(one for one in kernel.configs if one["WINDOW"] == weight.shape[1])
    blocks = -(-weight.shape[0] // config["CHANNELS"])
    kernel.launch_with((-(-count // config[unit]) if unit else count, blocks), config, given)


def launch_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: PrefillStates, *, activate: bool = True
) -> Tensor:
    given = _arguments(x, weight, bias, states.live, activate) | prefill_arguments(states)
    sequences = states.slots.live.numel()
    y = x.new_empty(x.shape)
    given |= {"y": y, "seq_idx": states.chunks.sequences.seq_idx, "sequences": sequences}
    _launch(conv_prefill, x.shape[0], given, weight, "ROWS")
    _launch(conv_states, sequences, given, weight)
    return y


def launch_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: DecodeStates, *, activate: bool = True
) -> Tensor:
    y = x.new_empty(x.shape)
    given = _arguments(x, weight, bias, states.live, activate) | decode_arguments(states, x) | {"y": y}
    _launch(conv_decode, x.shape[0], given, weight)
    return y
