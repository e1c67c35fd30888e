"""Mamba-2's recurrence with mamba-ssm's update of one token, in place in our slots; prefills by our Triton kernels.

The library takes numbers of heads as tensors of all channels; strides of zero make them so without a copy, and tell it
that a head's channels are equal.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_ext.ops import libraries
from megatron_ext.ops.ssd import triton
from megatron_ext.ops.state_slots import DecodeStates, library_states, zero


def _decode(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: DecodeStates, *, D: Tensor | None = None
) -> Tensor:
    (heads, head_dim), state_size = x.shape[1:], B.shape[2]
    skip, none = zero(x.device) if D is None else D[:, None], zero(x.device)
    pool, indices = library_states(states)
    return libraries.SELECTIVE_STATE_UPDATE.function()(
        pool,
        x,
        dt.float().unsqueeze(-1).expand(-1, -1, head_dim),
        A.float()[:, None, None].expand(-1, head_dim, state_size),
        B,
        C,
        D=skip.expand(heads, head_dim),
        dt_bias=none.expand(heads, head_dim),
        state_batch_indices=indices,
    )


BACKEND = replace(triton.BACKEND, name=libraries.MAMBA_SSM, takes=libraries.never, decode=_decode)
