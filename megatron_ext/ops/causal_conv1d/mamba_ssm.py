"""Convolution with the update of one token of causal-conv1d, mamba-ssm's companion; prefills by our Triton kernels.

The library needs states of the inputs' type, which `libraries` asks of an engine before its states are allocated.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from megatron_ext.ops import libraries
from megatron_ext.ops.causal_conv1d import triton
from megatron_ext.ops.state_slots import DecodeStates, library_states


def _decode(x: Tensor, weight: Tensor, bias: Tensor | None, states: DecodeStates, *, activation: str | None) -> Tensor:
    pool, slots = library_states(states)
    indices = None if slots is None else slots.int()  # asked for by its kernel
    return libraries.CAUSAL_CONV1D_UPDATE.function()(x, pool, weight, bias, activation, conv_state_indices=indices)


BACKEND, PLAIN_BACKEND = (
    replace(
        ours,
        name=libraries.MAMBA_SSM,
        takes=libraries.never,
        decode=functools.partial(_decode, activation=activation),
    )
    for ours, activation in ((triton.BACKEND, "silu"), (triton.PLAIN_BACKEND, None))
)
