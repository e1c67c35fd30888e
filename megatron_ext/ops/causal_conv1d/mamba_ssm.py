"""Convolution with the update of one token of causal-conv1d, mamba-ssm's companion; prefills by our Triton kernels.

The library needs states of the inputs' type, which `libraries` asks of an engine before its states are allocated.
"""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import libraries
from megatron_ext.ops.causal_conv1d import triton
from megatron_ext.ops.causal_conv1d.operator import ConvolutionBackend
from megatron_ext.ops.state_slots import library_states


def backend(ours: ConvolutionBackend, *, activate: bool) -> ConvolutionBackend:
    """Return the library's update as a backend; `ours` computes everything else."""
    activation = "silu" if activate else None

    def decode(x: Tensor, weight: Tensor, bias: Tensor | None, *, slots: Tensor | slice, live: Tensor) -> Tensor:
        states, indices = library_states(live, slots)
        return libraries.CAUSAL_CONV1D_UPDATE.function()(
            x,
            states,
            weight,
            bias,
            activation,
            conv_state_indices=None if indices is None else indices.int(),  # asked for by its kernel
        )

    return ConvolutionBackend(
        libraries.MAMBA_SSM,
        libraries.never,
        ours.convolve,
        ours.step,
        ours.states_after,
        prefill=ours.prefill,
        decode=decode,
    )


BACKEND = backend(triton.BACKEND, activate=True)
PLAIN_BACKEND = backend(triton.PLAIN_BACKEND, activate=False)
