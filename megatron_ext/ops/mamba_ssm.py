"""Updates of one token by the libraries mamba-ssm and causal-conv1d, in place in our slots.

Our Triton kernels compute the prefills. mamba-ssm takes numbers of heads as tensors of all channels; strides of zero
make them so without a copy, and tell it that a head's channels are equal. causal-conv1d needs states of the inputs'
type, which `libraries` asks of an engine before its states are allocated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ext.ops import libraries
from megatron_ext.ops.backends import FunctionBackend, never
from megatron_ext.ops.state_slots import DecodeStates


def library_backend(ours: FunctionBackend, decode: Callable[..., Tensor]) -> FunctionBackend:
    """Return our Triton backend with a library's decode."""

    def find(name: str) -> Callable[..., object] | None:
        return decode if name == "decode" else ours.find(name)

    return FunctionBackend(libraries.MAMBA_SSM, never, find)


def _pool_and_slots(states: DecodeStates) -> tuple[Tensor, Tensor | None]:
    """Return the pool and the slots of each request, or a view of consecutive slots and None; nothing is copied."""
    slots, pool = states
    return (pool[slots], None) if isinstance(slots, slice) else (pool, slots)


@functools.cache
def _zero(device: torch.device) -> Tensor:
    """Return a zero, [1] fp32, to be expanded where a library needs a tensor; kept, so that no step fills it."""
    return torch.zeros(1, dtype=torch.float32, device=device)


def ssd_decode(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: DecodeStates, *, D: Tensor | None = None
) -> Tensor:
    """Compute Mamba-2's recurrence of one token of each request."""
    (heads, head_dim), state_size = x.shape[1:], B.shape[2]
    skip, none = _zero(x.device) if D is None else D[:, None], _zero(x.device)
    pool, indices = _pool_and_slots(states)
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


def selective_decode(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, states: DecodeStates, *, D: Tensor | None = None
) -> Tensor:
    """Compute Mamba-1's recurrence of one token of each request."""
    none = _zero(u.device).expand(u.shape[1])
    pool, indices = _pool_and_slots(states)
    skip = none if D is None else D
    return libraries.SELECTIVE_STATE_UPDATE.function()(
        pool, u, delta.float(), A.float(), B, C, D=skip, dt_bias=none, state_batch_indices=indices
    )


def conv_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: DecodeStates, *, activate: bool = True
) -> Tensor:
    """Compute the convolution of one token of each request."""
    pool, slots = _pool_and_slots(states)
    indices = None if slots is None else slots.int()  # asked for by its kernel
    activation = "silu" if activate else None
    return libraries.CAUSAL_CONV1D_UPDATE.function()(x, pool, weight, bias, activation, conv_state_indices=indices)
