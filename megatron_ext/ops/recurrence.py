"""Operators with states: SSD, the selective scan, the gated delta rule, and the causal convolution.

An operator has three entry points, which take its own inputs first: `scan` over packed sequences from zero or given
states (differentiable, for training), `prefill` over packed sequences whose states lie in pools, and `decode` of one
token of each of R requests, in place. A backend provides a scan and a step without pools; a backend whose kernels read
and write slots also provides `prefill` and `decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.backends import Backend, Backends
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates, StateSlots, initial_states, store
from megatron_ext.ops.varlen import PackedChunks


class ScanOutput(NamedTuple):
    """Result of a scan.

    Attributes:
        y: [T, ...] in the type of the scan's input x; zero at rows after the last sequence.
        final_states: [S, ...], after the last token of each sequence; fp32, or of the inputs' type by a convolution.
        chunk_states: [n, ...] of the same type, after the last token of each chunk.
    """

    y: Tensor
    final_states: Tensor
    chunk_states: Tensor


@dataclass(frozen=True)
class RecurrenceBackend(Backend):
    """Backend of an operator with states.

    Attributes:
        scan: (*inputs, chunks, initial_states=[S, ...] or None, **options) -> ScanOutput.
        step: (*inputs, states [R, ...], **options) -> y and the new states; the given ones are not modified.
        prefill: (*inputs, PrefillStates, **options) -> y, for kernels that read and write slots; None to use `scan`.
        decode: (*inputs, DecodeStates, **options) -> y; None to use `step`.
    """

    scan: Callable[..., ScanOutput]
    step: Callable[..., tuple[Tensor, Tensor]]
    prefill: Callable[..., Tensor] | None = None
    decode: Callable[..., Tensor] | None = None


class Recurrence:
    """Operator with states; takes the inputs of its reference's scan and step, packed as [T, ...] or [R, ...]."""

    def __init__(self, name: str, *backends: RecurrenceBackend) -> None:
        self.backends = Backends(name, *backends)

    def scan(
        self,
        x: Tensor,
        *inputs: Tensor | None,
        chunks: PackedChunks,
        initial_states: Tensor | None = None,
        **options: object,
    ) -> ScanOutput:
        """Run over packed sequences from `initial_states` [S, ...], zeros if None. Differentiable."""
        return self.backends.choose(x).scan(x, *inputs, chunks, initial_states=initial_states, **options)

    def prefill(
        self,
        x: Tensor,
        *inputs: Tensor | None,
        chunks: PackedChunks,
        slots: StateSlots,
        live: Tensor,
        snapshots: Tensor | None,
        **options: object,
    ) -> Tensor:
        """Run over packed sequences from their running states; write their final states and the snapshots.

        Args:
            x: Main input, which decides on the backend.
            inputs: Further inputs of the operator.
            chunks: See `PrefillStates`, also for the next three.
            slots: State slots.
            live: Running states.
            snapshots: Pool of snapshots.
            options: Options of the operator.

        Returns:
            y [T, ...].
        """
        states = PrefillStates(chunks, slots, live, snapshots)

        def compute(backend: RecurrenceBackend) -> Tensor:
            if backend.prefill is not None:
                return backend.prefill(x, *inputs, states, **options)
            return _prefill_by_scan(backend, (x, *inputs), states, options)

        return self.backends.compute(x, compute)

    def decode(
        self, x: Tensor, *inputs: Tensor | None, slots: Tensor | slice, live: Tensor, **options: object
    ) -> Tensor:
        """Run over one token of each of R requests: y [R, ...]; for `slots` and `live` see `DecodeStates`."""
        states = DecodeStates(slots, live)

        def compute(backend: RecurrenceBackend) -> Tensor:
            if backend.decode is not None:
                return backend.decode(x, *inputs, states, **options)
            y, new = backend.step(x, *inputs, _widened(live[slots]), **options)
            store(live, slots, new)
            return y

        return self.backends.compute(x, compute)


def _prefill_by_scan(
    backend: RecurrenceBackend,
    inputs: Sequence[Tensor | None],
    states: PrefillStates,
    options: Mapping[str, object],
) -> Tensor:
    """Compute a prefill by a scan without slots: gather states before it, scatter them after it."""
    chunks, slots, live, snapshots = states
    scanned = backend.scan(*inputs, chunks, initial_states=_widened(initial_states(live, slots)), **options)
    store(live, slots.live, scanned.final_states)
    if slots.snapshots is not None:
        assert snapshots is not None, "somewhere to keep them"
        store(snapshots, slots.snapshots.slots, scanned.chunk_states[slots.snapshots.chunks])
    return scanned.y


def _widened(states: Tensor) -> Tensor:
    """Return states in fp32; in their own type if that is wider."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def cpp_backend(reference: RecurrenceBackend, operator: str, **defaults: object) -> RecurrenceBackend:
    """Return the C++ kernels for CPUs, which read and write slots in place, as a backend.

    Args:
        reference: Backend whose scan and step compute what the kernels do not, such as training.
        operator: Prefix of the kernels' names.
        defaults: Options that the kernels take after the inputs, in order, with their defaults.
    """

    def prefill(*given: object, **options: object) -> Tensor:
        *inputs, states = given
        assert isinstance(states, PrefillStates), "states come last"
        kernel = getattr(cpp.kernels(), f"{operator}_prefill")
        return kernel(*inputs, *(defaults | options).values(), *cpp.prefill_places(*states))

    def decode(*given: object, **options: object) -> Tensor:
        *inputs, states = given
        assert isinstance(states, DecodeStates), "states come last"
        kernel = getattr(cpp.kernels(), f"{operator}_decode")
        return kernel(*inputs, *(defaults | options).values(), *cpp.decode_places(states.slots), states.live)

    return replace(reference, name=cpp.NAME, takes=cpp.takes, prefill=prefill, decode=decode)
