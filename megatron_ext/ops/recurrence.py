"""Operators with states: SSD, the selective scan, the gated delta rule, and the causal convolution.

An operator has three entry points, which take its own inputs first: `scan` over packed sequences from zero states
(differentiable, for training), `prefill` over packed sequences whose states lie in pools, and `decode` of one token of
each of R requests, in place. The reference has a scan and a step without pools; backends have kernels that read and
write slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_ext.ops import cpp
from megatron_ext.ops.backends import FunctionBackend, Operator
from megatron_ext.ops.state_slots import DecodeStates, PrefillStates, initial_states, store
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


class Recurrence:
    """Operator with states; takes the inputs of its reference's scan and step, packed as [T, ...] or [R, ...].

    Args:
        name: Name of the operator.
        scan: (*inputs, chunks, initial_states=[S, ...] or None, **options) -> ScanOutput, in plain torch.
        step: (*inputs, states [R, ...], **options) -> y and the new states; the given ones are not modified.
        backends: Backends with kernels that read and write slots: `prefill` (*inputs, PrefillStates, **options) -> y,
            and `decode` (*inputs, DecodeStates, **options) -> y.
        options: Options of each call.
    """

    def __init__(
        self,
        name: str,
        scan: Callable[..., ScanOutput],
        step: Callable[..., tuple[Tensor, Tensor]],
        *backends: FunctionBackend,
        **options: object,
    ) -> None:
        self.backends = Operator(name, *backends)
        self.reference_scan, self._step, self._options = scan, step, options

    def scan(self, x: Tensor, *inputs: Tensor | None, states: PackedChunks, **options: object) -> Tensor:
        """Run over packed sequences from zero states: y [T, ...]. Differentiable."""
        return self.reference_scan(x, *inputs, states, initial_states=None, **self._options | options).y

    def prefill(self, x: Tensor, *inputs: Tensor | None, states: PrefillStates, **options: object) -> Tensor:
        """Run over packed sequences from their running states; write their final states and the snapshots.

        Returns y [T, ...]. The main input `x` decides on the backend.
        """
        return self._compute("prefill", self._prefill_by_scan, x, *inputs, states, **options)

    def decode(self, x: Tensor, *inputs: Tensor | None, states: DecodeStates, **options: object) -> Tensor:
        """Run over one token of each of R requests: y [R, ...]; their running states are written."""
        return self._compute("decode", self._decode_by_step, x, *inputs, states, **options)

    def _compute(
        self, name: str, by_reference: Callable[..., Tensor], x: Tensor, *given: object, **options: object
    ) -> Tensor:
        def call(backend: FunctionBackend) -> Tensor:
            run = backend.find(name) or by_reference
            return cast("Tensor", run(x, *given, **self._options | options))

        return self.backends.compute(x, call)

    def _prefill_by_scan(self, *given: Any, **options: object) -> Tensor:
        """Compute a prefill by a scan without slots: gather states before it, scatter them after it."""
        *inputs, (chunks, slots, live, snapshots) = given
        initial = _widened(initial_states(live, slots))
        scanned = self.reference_scan(*inputs, chunks, initial_states=initial, **options)
        store(live, slots.live, scanned.final_states)
        if slots.snapshots is not None:
            store(snapshots, slots.snapshots.slots, scanned.chunk_states[slots.snapshots.chunks])
        return scanned.y

    def _decode_by_step(self, *given: Any, **options: object) -> Tensor:
        *inputs, (slots, live) = given
        y, new = self._step(*inputs, _widened(live[slots]), **options)
        store(live, slots, new)
        return y


def _widened(states: Tensor) -> Tensor:
    """Return states in fp32; in their own type if that is wider."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


def cpp_backend(operator: str, **defaults: object) -> FunctionBackend:
    """Return the C++ kernels for CPUs as a backend.

    Args:
        operator: Prefix of the kernels' names.
        defaults: Options that the kernels take after the inputs, in order, with their defaults.
    """

    def prefill(*given: Any, **options: object) -> Tensor:
        *inputs, (chunks, slots, live, snapshots) = given
        places, kept = [chunks.sequences.cu_seqlens, slots.live, slots.has_initial_state, live], slots.snapshots
        places += [None] * 4 if kept is None else [kept.slots, kept.offsets, kept.tokens, snapshots]
        return getattr(cpp.kernels(), f"{operator}_prefill")(*inputs, *(defaults | options).values(), *places)

    def decode(*given: Any, **options: object) -> Tensor:
        *inputs, (slots, live) = given
        where = (None, slots.start or 0) if isinstance(slots, slice) else (slots, 0)  # a list, or the first of all
        return getattr(cpp.kernels(), f"{operator}_decode")(*inputs, *(defaults | options).values(), *where, live)

    return FunctionBackend(cpp.NAME, cpp.takes, {"prefill": prefill, "decode": decode}.get)
