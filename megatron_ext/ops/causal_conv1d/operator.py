"""The convolution as layers call it: over sequences in training, over a step's prefill and decode with states in pools.

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
    """One way to convolve; the signatures are those of the reference.

    Attributes:
        name: Unique among the operator's backends.
        takes: Whether it computes for a main input like that.
        convolve: Over packed sequences.
        step: Over one token of each request.
        states_after: The states of sequences after some of their tokens.
        prefill: As `CausalConv1d.prefill`, for kernels that read and write slots; None goes by the three above.
        decode: As `CausalConv1d.decode`; None goes by `step`.
    """

    name: str
    takes: Callable[[Tensor], bool]
    convolve: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., tuple[Tensor, Tensor]]
    states_after: Callable[..., Tensor]
    prefill: Callable[..., Tensor] | None = None
    decode: Callable[..., Tensor] | None = None


class CausalConv1d:
    """The operator; x is [T, Cn] or [R, Cn], weight [Cn, K], bias [Cn] or None, everywhere."""

    def __init__(self, name: str, *backends: ConvolutionBackend) -> None:
        self.backends = Backends(name, *backends)

    def scan(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, chunks: PackedChunks) -> Tensor:
        """Convolve packed sequences that begin with zeros: [T, Cn]. Differentiable."""
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
        """Convolve packed sequences behind their live states; their last states, and those to be kept, are written.

        Args:
            x: Inputs; may have rows behind the last sequence, which are not read.
            weight: Of each channel.
            bias: Of each channel.
            chunks: Where sequences lie on the token axis.
            slots: Where the sequences' states lie.
            live: [slots, Cn, K-1], written in place; every initial state is read before it (HY-8).
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
    """`CausalConv1d.prefill` by a backend that knows no slots: states are gathered before it and scattered after it."""
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
    """`CausalConv1d.decode` in the same way."""
    y, states = backend.step(x, weight, bias, live[slots].to(x.dtype))
    store(live, slots, states)
    return y
