"""Recurrent operators: the common interface of SSD, the selective scan and the gated delta rule.

An operator has three entry points, which take its own inputs first: `scan` over packed sequences from zero or given
states (differentiable, for training), `prefill` over packed sequences whose states lie in pools, and `decode` of one
token of each of R requests, in place. A backend provides a scan and a step without pools; a backend whose kernels read
and write slots also provides `prefill` and `decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_ext.ops.backends import Backends
from megatron_ext.ops.state_slots import StateSlots, initial_states, store
from megatron_ext.ops.varlen import PackedChunks


class ScanOutput(NamedTuple):
    """Result of a scan.

    Attributes:
        y: [T, ...] in the type of the scan's input x; zero at rows after the last sequence.
        final_states: [S, ...] fp32, after the last token of each sequence.
        chunk_states: [n, ...] fp32, after the last token of each chunk.
    """

    y: Tensor
    final_states: Tensor
    chunk_states: Tensor


@dataclass(frozen=True)
class RecurrenceBackend:
    """Backend of a recurrence.

    Attributes:
        name: Unique among the operator's backends.
        takes: Returns whether the backend supports a main input.
        scan: (*inputs, chunks, initial_states=[S, ...] or None, **options) -> ScanOutput.
        step: (*inputs, states [R, ...], **options) -> y and the new states; the given ones are not modified.
        prefill: See `Recurrence.prefill`, for kernels that read and write slots; None to use `scan`.
        decode: See `Recurrence.decode`; None to use `step`.
    """

    name: str
    takes: Callable[[Tensor], bool]
    scan: Callable[..., ScanOutput]
    step: Callable[..., tuple[Tensor, Tensor]]
    prefill: Callable[..., Tensor] | None = None
    decode: Callable[..., Tensor] | None = None


class Recurrence:
    """Recurrent operator; takes the inputs of its reference's scan and step, packed as [T, ...] or [R, ...]."""

    def __init__(self, name: str, *backends: RecurrenceBackend) -> None:
        self.backends = Backends(name, *backends)

    def scan(
        self, *inputs: Tensor, chunks: PackedChunks, initial_states: Tensor | None = None, **options: object
    ) -> ScanOutput:
        """Run over packed sequences from `initial_states` [S, ...], zeros if None. Differentiable."""
        backend = self.backends.choose(inputs[0])
        return backend.scan(*inputs, chunks, initial_states=initial_states, **options)

    def prefill(
        self,
        *inputs: Tensor,
        chunks: PackedChunks,
        slots: StateSlots,
        live: Tensor,
        snapshots: Tensor | None,
        **options: object,
    ) -> Tensor:
        """Run over packed sequences from their running states; write their final states and the snapshots.

        Args:
            inputs: Inputs of the operator.
            chunks: Places of sequences and kernel chunks on the token axis.
            slots: State slots of the sequences.
            live: Running states, [slots, ...], written in place; every initial state is read before it.
            snapshots: [slots, ...], written in place; not needed if `slots` keeps nothing.
            options: Options of the operator.

        Returns:
            y [T, ...].
        """
        backend = self.backends.choose(inputs[0])
        if backend.prefill is not None:
            return backend.prefill(*inputs, chunks=chunks, slots=slots, live=live, snapshots=snapshots, **options)
        return prefill_by_scan(backend.scan, inputs, chunks, slots, live, snapshots, options)

    def decode(self, *inputs: Tensor, slots: Tensor | slice, live: Tensor, **options: object) -> Tensor:
        """Run over one token of each of R requests: y [R, ...].

        Args:
            inputs: Inputs of the operator.
            slots: Running state slots, [R] int64, or a slice if consecutive, so that states are views.
            live: Running states, [slots, ...], written in place.
            options: Options of the operator.
        """
        backend = self.backends.choose(inputs[0])
        if backend.decode is not None:
            return backend.decode(*inputs, slots=slots, live=live, **options)
        return decode_by_step(backend.step, inputs, slots, live, options)


def prefill_by_scan(
    scan: Callable[..., ScanOutput],
    inputs: Sequence[Tensor],
    chunks: PackedChunks,
    slots: StateSlots,
    live: Tensor,
    snapshots: Tensor | None,
    options: Mapping[str, object],
) -> Tensor:
    """Compute `Recurrence.prefill` by a scan without slots: gather states before it, scatter them after it."""
    scanned = scan(*inputs, chunks, initial_states=initial_states(live, slots).float(), **options)
    store(live, slots.live, scanned.final_states)
    if slots.snapshots is not None:
        assert snapshots is not None, "somewhere to keep them"
        store(snapshots, slots.snapshots.slots, scanned.chunk_states[slots.snapshots.chunks])
    return scanned.y


def decode_by_step(
    step: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    slots: Tensor | slice,
    live: Tensor,
    options: Mapping[str, object],
) -> Tensor:
    """Compute `Recurrence.decode` by a step without slots."""
    y, states = step(*inputs, live[slots].float(), **options)
    store(live, slots, states)
    return y
