"""Constant multipliers of activations; 1 everywhere in most models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.checks import require
from megatron_ext.config.layers.stack import StackFields


@dataclass(frozen=True)
class MultiplierFields(StackFields):
    """Multipliers of activations, not weights: scaling rounds 16-bit weights, and each use of tied ones has its own."""

    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of every layer's output
    attention_output_multiplier: float = 1.0  # of attention's output, in addition
    recurrent_output_multiplier: float = 1.0
    mlp_output_multiplier: float = 1.0  # experts too
    mlp_gate_multiplier: float = 1.0  # before the activation of a gated MLP
    softmax_scale: float | None = None  # of queries times keys; default: one over the root of a head's channels


MULTIPLIERS = tuple(MultiplierFields.__annotations__)


def check_multipliers(config: MultiplierFields, *, is_gated: bool, has_learned_positions: bool) -> None:
    """Require positive multipliers, and only for operations that the model has.

    Args:
        config: Fields to check.
        is_gated: Whether MLPs have gates.
        has_learned_positions: Whether the embedding adds positions.
    """
    for name in MULTIPLIERS:
        value = getattr(config, name)
        require(value is None or (math.isfinite(value) and value > 0), f"{name} {value} must be more than zero")
    require(
        is_gated or config.mlp_gate_multiplier == 1,
        f"mlp_gate_multiplier {config.mlp_gate_multiplier} is for gated MLPs; give --swiglu",
    )
    require(
        not has_learned_positions or config.embedding_multiplier == 1,
        f"embedding_multiplier {config.embedding_multiplier} is not supported with learned positions; 1 would do",
    )
