"""Mamba-1's recurrence with mamba-ssm's update of one token, in place in our slots; prefills by our Triton kernels."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.ops import libraries
from megatron_ext.ops.recurrence import RecurrenceBackend
from megatron_ext.ops.selective_scan import reference, triton
from megatron_ext.ops.state_slots import library_states, zero


def decode(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    slots: Tensor | slice,
    live: Tensor,
    D: Tensor | None = None,
) -> Tensor:
    """Compute `Recurrence.decode` for the inputs of `reference.selective_scan_step`."""
    channels, none = u.shape[1], zero(u.device)
    states, indices = library_states(live, slots)
    return libraries.SELECTIVE_STATE_UPDATE.function()(
        states,
        u,
        delta.float(),
        A.float(),
        B,
        C,
        D=none.expand(channels) if D is None else D,
        dt_bias=none.expand(channels),
        state_batch_indices=indices,
    )


BACKEND = RecurrenceBackend(
    libraries.MAMBA_SSM,
    libraries.never,
    reference.selective_scan,
    reference.selective_scan_step,
    prefill=triton.prefill,
    decode=decode,
)
