"""Mamba-1's recurrence with mamba-ssm's update of one token, in place in our slots; prefills by our Triton kernels."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_ext.ops import libraries
from megatron_ext.ops.selective_scan import triton
from megatron_ext.ops.state_slots import DecodeStates, library_states, zero


def _decode(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, states: DecodeStates, *, D: Tensor | None = None
) -> Tensor:
    channels, none = u.shape[1], zero(u.device)
    pool, indices = library_states(states)
    return libraries.SELECTIVE_STATE_UPDATE.function()(
        pool,
        u,
        delta.float(),
        A.float(),
        B,
        C,
        D=none.expand(channels) if D is None else D,
        dt_bias=none.expand(channels),
        state_batch_indices=indices,
    )


BACKEND = replace(triton.BACKEND, name=libraries.MAMBA_SSM, takes=libraries.never, decode=_decode)
