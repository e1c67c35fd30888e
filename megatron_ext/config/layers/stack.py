"""Fields common to all layers of a stack."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.checks import require

NORMALIZATIONS = ("RMSNorm", "LayerNorm")


@dataclass(frozen=True)
class StackFields:
    """Model width, and the norms before layers."""

    hidden_size: int = 256
    normalization: str = NORMALIZATIONS[0]
    norm_epsilon: float = 1e-5
    apply_layernorm_1p: bool = False  # norms multiply by 1 + weight


def check_norms(config: StackFields) -> None:
    """Require a known norm, and an epsilon above zero."""
    kind, epsilon = config.normalization, config.norm_epsilon
    require(kind in NORMALIZATIONS, f"normalization {kind!r} is unknown; one of {', '.join(NORMALIZATIONS)}")
    require(
        not config.apply_layernorm_1p or kind == "RMSNorm",
        f"--apply-layernorm-1p is not supported with --normalization {kind}; RMSNorm would do",
    )
    require(math.isfinite(epsilon) and epsilon > 0, f"--norm-epsilon {epsilon} must be more than zero")
