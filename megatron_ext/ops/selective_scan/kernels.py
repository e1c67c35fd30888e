"""Mamba-1's recurrence on a CUDA device: prefill token by token, and one token of each request.

A program computes some channels with all their N states, which stay in registers from a sequence's first token of the
step to its last. Every token is computed the same way whatever comes beside, before or after it: bits do not depend on
where a sequence is cut.

A prefill reads tokens in groups: the next group's inputs are loaded while the current one is computed, so that memory
latency is hidden. Places after a sequence's last token, or after a token whose state is kept, are steps of zero, which
leave a state unchanged.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.triton import launching
from megatron_ext.ops.triton.device import kept_place, store_kept
from megatron_ext.ops.triton.kernel_registry import MAX_REGISTERS, STATE_TYPES, Argument, Kernel, config, kernel

LOG2_E = tl.constexpr(1.4426950408889634)
STATES = (16, 32, 64)
GROUP = 4  # tokens; two groups are in registers, and 32-bit inputs leave no room for more


@triton.jit
def _advance(state, u, delta, rate, b, c, skip):
    """Return the state [CHANNELS, N] after a token and its output [CHANNELS, 1]; u, delta likewise; b, c [1, N]."""
    state = tl.fma(state, tl.exp2(delta * rate), delta * u * b)  # one rounding, at any place of a group
    return state, tl.sum(state * c, 1)[:, None] + skip * u


@triton.jit
def _load_group(u, delta, B, C, u_row, delta_row, b_row, c_row, first, until, d, n, is_d, is_n, TOKENS: tl.constexpr):
    """Load at most TOKENS tokens from `first` on and before `until`: (u, delta, b, c) each; zeros after them.

    Arrays have the dimensions that `_advance` takes, so that they are loaded in the layout of the computation.
    """
    group = ()
    for i in tl.static_range(TOKENS):
        row, is_token = first.to(tl.int64) + i, first + i < until
        inputs = tl.load(u + row * u_row + d, mask=is_d & is_token, other=0.0)
        step = tl.load(delta + row * delta_row + d, mask=is_d & is_token, other=0.0)
        b = tl.load(B + row * b_row + n, mask=is_n & is_token, other=0.0)
        c = tl.load(C + row * c_row + n, mask=is_n & is_token, other=0.0)
        token = inputs[:, None], step[:, None], b[None, :], c[None, :]
        group = group + (token,)  # type: ignore[assignment]  # noqa: RUF005 - Triton has no *
    return group


@kernel(
    pointers={
        "T": "u B C y",
        "fp32": "delta A D",
        "S": "live snapshots",
        "i64": "cu_seqlens slots kept_slots kept_offsets kept_tokens",
        "i1": "has_initial",
    },
    counts="kept has_skip",
    types=STATE_TYPES,
    configs=[config(registers=MAX_REGISTERS, num_warps=1, CHANNELS=256 // n, N=n, TOKENS=GROUP) for n in STATES],
)
def selective_prefill(
    u, delta, A, B, C, D, y, live, snapshots, cu_seqlens, slots, kept_slots, kept_offsets, kept_tokens,
    has_initial, u_row, delta_row, b_row, c_row, live_row, snapshot_row, channels, state_size, kept, has_skip,
    CHANNELS: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute outputs of a sequence's tokens of some channels; write the kept states and, in place, the final state."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int32), tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    if (slot >= 0) & (begin < end):
        d, n = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, N)
        is_d, is_n = d < channels, n < state_size
        is_state = is_d[:, None] & is_n[None, :]
        cell = d[:, None] * state_size + n[None, :]
        has_state = tl.load(has_initial + sequence).to(tl.int1)
        state = tl.load(live + slot * live_row + cell, mask=is_state & has_state, other=0.0).to(tl.float32)
        rate = tl.load(A + cell, mask=is_state, other=0.0) * LOG2_E
        skip = tl.load(D + d, mask=is_d & (has_skip != 0), other=0.0)[:, None]
        entry = tl.load(kept_offsets + sequence).to(tl.int32)
        stop = kept_place(kept_offsets, kept_tokens, kept, sequence, entry)
        while begin < end:
            until, first = min(stop, end), begin
            group = _load_group(
                u, delta, B, C, u_row, delta_row, b_row, c_row, first, until, d, n, is_d, is_n, TOKENS=TOKENS
            )
            for _ in range(begin, until, TOKENS):
                # One group ahead, so that its loads overlap with the recurrence of this one.
                following = _load_group(
                    u, delta, B, C, u_row, delta_row, b_row, c_row, first + TOKENS, until, d, n, is_d, is_n,
                    TOKENS=TOKENS,
                )  # fmt: skip
                for i in tl.static_range(TOKENS):
                    inputs, step, b, c = group[i]
                    inputs, b, c = inputs.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
                    state, outputs = _advance(state, inputs, step, rate, b, c, skip)
                    target = y + (first.to(tl.int64) + i) * channels + d[:, None]
                    tl.store(target, outputs.to(y.dtype.element_ty), mask=is_d[:, None] & (first + i < until))
                first += TOKENS
                group = following
            while stop == until:
                store_kept(snapshots, snapshot_row, state, cell, is_state, kept_slots, entry)
                entry += 1
                stop = kept_place(kept_offsets, kept_tokens, kept, sequence, entry)
            begin = until
        tl.store(live + slot * live_row + cell, state.to(live.dtype.element_ty), mask=is_state)


@kernel(
    pointers={"T": "u B C y", "fp32": "delta A D", "S": "live", "i64": "slots"},
    counts="has_skip",
    types=STATE_TYPES,
    configs=[config(registers=MAX_REGISTERS, CHANNELS=2048 // n, N=n) for n in STATES],
)
def selective_decode(
    u, delta, A, B, C, D, y, live, slots, u_row, delta_row, b_row, c_row, live_row, channels, state_size, has_skip,
    CHANNELS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute one token of a request, of some channels; a padding row becomes zero and touches no slot."""
    row = tl.program_id(0).to(tl.int64)
    d, n = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, N)
    is_d, is_n = d < channels, n < state_size
    slot = tl.load(slots + row)
    if slot < 0:
        tl.store(y + row * channels + d, tl.zeros((CHANNELS,), y.dtype.element_ty), mask=is_d)
    else:
        is_state = is_d[:, None] & is_n[None, :]
        cell = d[:, None] * state_size + n[None, :]
        state = tl.load(live + slot * live_row + cell, mask=is_state, other=0.0).to(tl.float32)
        rate = tl.load(A + cell, mask=is_state, other=0.0) * LOG2_E
        skip = tl.load(D + d, mask=is_d & (has_skip != 0), other=0.0)[:, None]
        step = tl.load(delta + row * delta_row + d, mask=is_d, other=0.0)[:, None]
        inputs = tl.load(u + row * u_row + d, mask=is_d, other=0.0).to(tl.float32)[:, None]
        b = tl.load(B + row * b_row + n, mask=is_n, other=0.0).to(tl.float32)[None, :]
        c = tl.load(C + row * c_row + n, mask=is_n, other=0.0).to(tl.float32)[None, :]
        state, outputs = _advance(state, inputs, step, rate, b, c, skip)
        tl.store(y + row * channels + d[:, None], outputs.to(y.dtype.element_ty), mask=is_d[:, None])
        tl.store(live + slot * live_row + cell, state.to(live.dtype.element_ty), mask=is_state)


def _arguments(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, live: Tensor, D: Tensor | None
) -> dict[str, Argument]:
    """Return the arguments of both kernels; the stand-in for a missing D is not read.

    Raises:
        NoKernelError: There is no kernel for them.
    """
    launching.require_states(selective_prefill, live, u, B, N=B.shape[1])
    rates = A.float().contiguous()
    return launching.rowed(u=u, delta=delta.float(), B=B, C=C) | {
        "A": rates,
        "D": rates if D is None else D.float().contiguous(),
        "channels": u.shape[1],
        "state_size": B.shape[1],
        "has_skip": int(D is not None),
    }


def _launch(kernel: Kernel, count: int, u: Tensor, B: Tensor, given: dict[str, Argument]) -> None:
    """Launch for `count` sequences or requests."""
    config = kernel.config_for(u.dtype, N=B.shape[1])
    kernel.launch_with((count, -(-u.shape[1] // config["CHANNELS"])), config, given)


def launch_prefill(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, states: PrefillStates, *, D: Tensor | None = None
) -> Tensor:
    """Compute a prefill of the inputs of `reference.selective_scan`."""
    given, y = _arguments(u, delta, A, B, C, states.live, D), u.new_zeros(u.shape)
    given |= launching.prefill_arguments(states) | {"y": y}
    _launch(selective_prefill, states.slots.live.numel(), u, B, given)
    return y


def launch_decode(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, states: DecodeStates, *, D: Tensor | None = None
) -> Tensor:
    given, y = _arguments(u, delta, A, B, C, states.live, D), u.new_empty(u.shape)
    _launch(selective_decode, u.shape[0], u, B, given | launching.decode_arguments(states, u) | {"y": y})
    return y
