"""Convolution operator: over sequences in training, over a step's prefill and decode with states in pools.

Letters: T tokens, Cn channels, K window, S sequences, R requests, n snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.state_slots import StateSlots, initial_states, store
from megatron_ext.ops.varlen import PackedChunks


@dataclass(frozen=True)
class ConvolutionBackend:
    """Backend of the convolution, with the signatures of the reference functions.

    Attributes:
        name: Unique among the operator's backends.
        takes: Returns whether the backend supports a main input.
        convolve: Convolves packed sequences.
        step: Convolves one token of each request.
        states_after: Returns the states of sequences after some of their tokens.
        prefill: See `CausalConv1d.prefill`, for kernels that read and write slots; None to use the three above.
        decode: See `CausalConv1d.decode`; None to use `step`.
    """

    name: str
    takes: Callable[[Tensor], bool]
    convolve: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., tuple[Tensor, Tensor]]
    states_after: Callable[..., Tensor]
    prefill: Callable[..., Tensor] | None = None
    decode: Callable[..., Tensor] | None = None


class CausalConv1d:
    """Convolution operator; x is [T, Cn] or [R, Cn], weight [Cn, K], bias [Cn] or None, everywhere."""

    def __init__(self, name: str, *backends: ConvolutionBackend) -> None:
        self.backends = Backends(name, *backends)

    def scan(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, chunks: PackedChunks) -> Tensor:
        """Convolve packed sequences from zero states: [T, Cn]. Differentiable."""
        return self.backends.choose(x).convolve(x, weight, bias, chunks.sequences)[0]

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
        """Convolve packed sequences from their running states; write their final states and the snapshots.

        Args:
            x: Inputs; may have rows after the last sequence, which are not read.
            weight: Weight of each channel.
            bias: Bias of each channel.
            chunks: Places of the sequences on the token axis.
            slots: State slots of the sequences.
            live: Running states, [slots, Cn, K-1], written in place; every initial state is read before it (HY-8).
            snapshots: [slots, Cn, K-1], written in place; not needed if `slots` keeps nothing.

        Returns:
            y [T, Cn].
        """
        backend = self.backends.choose(x)
        if backend.prefill is not None:
            return backend.prefill(x, weight, bias, chunks=chunks, slots=slots, live=live, snapshots=snapshots)
        return prefill_by_scan(backend, x, weight, bias, chunks, slots, live, snapshots)

    def decode(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, slots: Tensor | slice, live: Tensor) -> Tensor:
        """Convolve one token of each of R requests: [R, Cn]; `live` [slots, Cn, K-1] is written in place."""
        backend = self.backends.choose(x)
        if backend.decode is not None:
            return backend.decode(x, weight, bias, slots=slots, live=live)
        return decode_by_step(backend, x, weight, bias, slots, live)


def prefill_by_scan(
    backend: ConvolutionBackend,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chunks: PackedChunks,
    slots: StateSlots,
    live: Tensor,
    snapshots: Tensor | None,
) -> Tensor:
    """Compute `CausalConv1d.prefill` on a backend without slots: gather states before, scatter them after."""
    initial = initial_states(live, slots).to(x.dtype)
    y, final = backend.convolve(x, weight, bias, chunks.sequences, initial_states=initial)
    store(live, slots.live, final)
    if slots.snapshots is not None:
        places = slots.snapshots
        first_tokens = chunks.sequences.cu_seqlens[places.sequences]
        kept = backend.states_after(x, places.tokens, first_tokens, initial[places.sequences])
        assert snapshots is not None, "somewhere to keep them"
        store(snapshots, places.slots, kept)
    return y


def decode_by_step(
    backend: ConvolutionBackend, x: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor | slice, live: Tensor
) -> Tensor:
    """Compute `CausalConv1d.decode` on a backend without slots."""
    y, states = backend.step(x, weight, bias, live[slots].to(x.dtype))
    store(live, slots, states)
    return y
