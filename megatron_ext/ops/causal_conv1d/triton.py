"""Convolution in Triton, for CUDA devices: reads and writes slots in place, with the kernels in `kernels.py`.

A slot of -1 marks a row or a sequence of padding: its outputs are zeros, and no slot is touched.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.causal_conv1d import reference
from megatron_ext.ops.recurrence import RecurrenceBackend
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates
from megatron_ext.ops.triton.kernel_registry import Argument, Kernel
from megatron_ext.ops.triton.launching import decode_arguments, launch_with, prefill_arguments, require_own_rows, rowed


def _arguments(x: Tensor, weight: Tensor, bias: Tensor | None, live: Tensor, activate: bool) -> dict[str, Argument]:
    """Return the arguments of the inputs; the stand-in for a missing bias is not read.

    Raises:
        NoKernelError: There is no kernel for them.
    """
    from megatron_ext.ops.causal_conv1d import kernels

    window, weight = weight.shape[1], weight.contiguous()
    if window not in kernels.WINDOWS:
        raise NoKernelError(f"the convolution has no kernel for a window of {window}, only for {kernels.WINDOWS}")
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise NoKernelError(f"the convolution has no kernel for weights of {weight.dtype} and inputs of {x.dtype}")
    require_own_rows(live, "the convolution")
    kernels.conv_prefill.require(T=x.dtype, S=live.dtype)
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
    launch_with(kernel, (-(-count // config[unit]) if unit else count, blocks), config, given)


def _prefill(x: Tensor, weight: Tensor, bias: Tensor | None, states: PrefillStates, *, activate: bool) -> Tensor:
    given = _arguments(x, weight, bias, states.live, activate) | prefill_arguments(states)
    from megatron_ext.ops.causal_conv1d import kernels

    sequences = states.slots.live.numel()
    y = x.new_empty(x.shape)
    given |= {"y": y, "seq_idx": states.chunks.sequences.seq_idx, "sequences": sequences}
    _launch(kernels.conv_prefill, x.shape[0], given, weight, "ROWS")
    _launch(kernels.conv_states, sequences, given, weight)
    return y


def _decode(x: Tensor, weight: Tensor, bias: Tensor | None, states: DecodeStates, *, activate: bool) -> Tensor:
    y = x.new_empty(x.shape)
    given = _arguments(x, weight, bias, states.live, activate) | decode_arguments(states, x) | {"y": y}
    from megatron_ext.ops.causal_conv1d import kernels

    _launch(kernels.conv_decode, x.shape[0], given, weight)
    return y


def _backend(plain: RecurrenceBackend, *, activate: bool) -> RecurrenceBackend:
    """Return the kernels as a backend; `plain` computes everything else, such as training."""
    prefill, decode = (functools.partial(function, activate=activate) for function in (_prefill, _decode))
    return replace(plain, name=triton.NAME, takes=triton.takes, prefill=prefill, decode=decode)


BACKEND = _backend(reference.BACKEND, activate=True)
PLAIN_BACKEND = _backend(reference.PLAIN_BACKEND, activate=False)
