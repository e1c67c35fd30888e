"""Convolution in Triton, for CUDA devices: reads and writes slots in place, with the kernels in `kernels.py`.

A slot of -1 marks a row or a sequence of padding: its outputs are zeros, and no slot is touched.
"""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import triton
from megatron_ext.ops.causal_conv1d import reference
from megatron_ext.ops.causal_conv1d.operator import ConvolutionBackend, decode_by_step, prefill_by_scan
from megatron_ext.ops.state_slots import StateSlots
from megatron_ext.ops.triton.kernel_registry import Config, Kernel
from megatron_ext.ops.triton.launching import (
    own_rows,
    prefill_arguments,
    rows_of,
    say_reference_computes,
    slot_tensor,
)
from megatron_ext.ops.varlen import PackedChunks


def _lacks(x: Tensor, weight: Tensor, bias: Tensor | None, live: Tensor) -> str | None:
    """Return why there is no kernel for these inputs; None if there is one."""
    from megatron_ext.ops.causal_conv1d import kernels

    window = weight.shape[1]
    if window not in kernels.WINDOWS:
        return f"the convolution has no kernel for a window of {window}, only for {kernels.WINDOWS}"
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return f"the convolution has no kernel for weights of {weight.dtype} and inputs of {x.dtype}"
    if not own_rows(live):
        return "the convolution has no kernel for states with columns that are not contiguous"
    return kernels.conv_prefill.lacks(T=x.dtype, S=live.dtype)


def _config(kernel: Kernel, window: int) -> Config:
    return next(one for one in kernel.configs if one["WINDOW"] == window)


def _blocks(channels: int, config: Config) -> int:
    return -(-channels // config["CHANNELS"])


class Convolution:
    """Convolution with Triton kernels, with SiLU or without."""

    def __init__(self, plain: ConvolutionBackend, *, activate: bool) -> None:
        self.plain = plain  # fallback for inputs without a kernel
        self.activate = activate

    def prefill(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        chunks: PackedChunks,
        slots: StateSlots,
        live: Tensor,
        snapshots: Tensor | None,
    ) -> Tensor:
        """Compute `CausalConv1d.prefill`."""
        lack = _lacks(x, weight, bias, live)
        if lack is not None:
            say_reference_computes(lack)
            return prefill_by_scan(self.plain, x, weight, bias, chunks, slots, live, snapshots)
        places = prefill_arguments(chunks, slots, live, snapshots)
        return self._prefill(rows_of(x), weight.contiguous(), bias, chunks.sequences.seq_idx, places)

    def _prefill(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, places: dict[str, Tensor | int]
    ) -> Tensor:
        from megatron_ext.ops.causal_conv1d import kernels

        rows, channels = x.shape
        y, slots = x.new_empty(rows, channels), places["slots"]
        assert isinstance(slots, Tensor)
        config, shared = _config(kernels.conv_prefill, weight.shape[1]), {"x_row": x.stride(0), "channels": channels}
        kernels.conv_prefill.launch(
            (-(-rows // config["ROWS"]), _blocks(channels, config)),
            config,
            x=x,
            weight=weight,
            y=y,
            seq_idx=seq_idx,
            rows=rows,
            sequences=slots.numel(),
            **self._flags(weight, bias),
            **{name: places[name] for name in ("live", "live_row", "cu_seqlens", "slots", "has_initial")},
            **shared,
        )
        config = _config(kernels.conv_states, weight.shape[1])
        kernels.conv_states.launch((slots.numel(), _blocks(channels, config)), config, x=x, **places, **shared)
        return y

    def decode(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, slots: Tensor | slice, live: Tensor) -> Tensor:
        """Compute `CausalConv1d.decode`."""
        lack = _lacks(x, weight, bias, live)
        if lack is not None:
            say_reference_computes(lack)
            return decode_by_step(self.plain, x, weight, bias, slots, live)
        from megatron_ext.ops.causal_conv1d import kernels

        x, weight, (rows, channels) = rows_of(x), weight.contiguous(), x.shape
        y, config = x.new_empty(rows, channels), _config(kernels.conv_decode, weight.shape[1])
        kernels.conv_decode.launch(
            (rows, _blocks(channels, config)),
            config,
            x=x,
            weight=weight,
            y=y,
            live=live,
            slots=slot_tensor(slots, rows, x.device),
            x_row=x.stride(0),
            live_row=live.stride(0),
            channels=channels,
            **self._flags(weight, bias),
        )
        return y

    def _flags(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | int]:
        """Return the bias, or an unread tensor in its place, and the flag for SiLU."""
        given = weight if bias is None else bias.contiguous()
        return {"bias": given, "has_bias": int(bias is not None), "activate": int(self.activate)}


def backend(plain: ConvolutionBackend, *, activate: bool) -> ConvolutionBackend:
    """Return the kernels as a backend; `plain` computes everything else: training, and unsupported shapes."""
    convolution = Convolution(plain, activate=activate)
    return ConvolutionBackend(
        triton.NAME,
        triton.takes,
        plain.convolve,
        plain.step,
        plain.states_after,
        prefill=convolution.prefill,
        decode=convolution.decode,
    )


BACKEND = backend(reference.BACKEND, activate=True)
PLAIN_BACKEND = backend(reference.PLAIN_BACKEND, activate=False)
