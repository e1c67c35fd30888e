"""Choice of the backends of an engine's operators, by its arguments and its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.errors import ConfigError
from megatron_ext.ops import cpp, triton
from megatron_ext.ops.activation import ACTIVATION
from megatron_ext.ops.backends import AUTO, Backend, Backends, preferring
from megatron_ext.ops.causal_conv1d import CAUSAL_CONV1D, PLAIN_CONV1D
from megatron_ext.ops.experts import EXPERTS
from megatron_ext.ops.gated_delta_rule import GATED_DELTA_RULE
from megatron_ext.ops.gated_norm import GATED_NORM
from megatron_ext.ops.linear import LINEAR, onednn
from megatron_ext.ops.paged_attention import PAGED_ATTENTION
from megatron_ext.ops.rotary import ROTARY_WRITE
from megatron_ext.ops.sampling import SAMPLING
from megatron_ext.ops.selective_scan import SELECTIVE_SCAN
from megatron_ext.ops.ssd import SSD
from megatron_ext.ops.state_copy import STATE_COPY
from megatron_ext.ops.step_size import STEP_SIZE

OPERATORS: Sequence[Backends[Backend]] = (
    PAGED_ATTENTION,
    *(operator.backends for operator in (CAUSAL_CONV1D, PLAIN_CONV1D, SSD, SELECTIVE_SCAN, GATED_DELTA_RULE)),
    *(STEP_SIZE, GATED_NORM, ACTIVATION, ROTARY_WRITE, SAMPLING, STATE_COPY, EXPERTS),
)


def check(wanted: str, device: torch.device) -> None:
    """Check that this machine supports the requested backend.

    Args:
        wanted: Name of a backend, or AUTO.
        device: Device of the model.

    Raises:
        ConfigError: The backend is not available; the message names alternatives.
    """
    problem = triton.problem(device) if wanted == triton.NAME else onednn.problem() if wanted == onednn.NAME else None
    if problem is not None:
        raise ConfigError(f"--operator-backend {wanted}: {problem}; {AUTO} and reference work here")


def check_quantization(device: torch.device) -> None:
    """Check that this machine can compute with quantized weights.

    Args:
        device: Device of the model.

    Raises:
        ConfigError: It cannot.
    """
    problem = f"the model is on {device.type}" if device.type != "cpu" else None
    if problem is None and not cpp.are_used():
        problem = "the C++ operators are not available here, see the line about them above"
    if problem is not None:
        raise ConfigError(f"--cpu-weight-quantization int8: {problem}; leave it out")


def chosen(wanted: str, x: torch.Tensor, linear: str | None = None) -> dict[str, tuple[str, ...]]:
    """Return the operators by backend for inputs like `x`, the most used backend first.

    Shapes that a backend has no kernel for still run on the reference, which is logged when they occur.

    Args:
        wanted: Name of a backend, or AUTO.
        x: Input of the operators.
        linear: Backend that packs the model's weights; None if none does.
    """
    found: dict[str, list[str]] = {linear or LINEAR.names[-1]: [LINEAR.operator]}
    with preferring(wanted):
        for backends in OPERATORS:
            found.setdefault(backends.choose(x).name, []).append(backends.operator)
    return {name: tuple(found[name]) for name in sorted(found, key=lambda name: -len(found[name]))}
