"""How layers are told positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.checks import bounded, require
from megatron_ext.config.layers.attention import AttentionFields

LEARNED_POSITIONS = "learned_absolute"
POSITION_EMBEDDINGS = ("none", "rope", LEARNED_POSITIONS)


@dataclass(frozen=True)
class PositionFields(AttentionFields):
    """Of position embeddings, which rotate attention heads or are added to the tokens'."""

    position_embedding_type: str = "none"
    rotary_base: int = bounded(10000, most=2**53)
    rotary_percent: float = 1.0
    use_rope_scaling: bool = False  # of long wavelengths, as Llama 3.1 does it
    rope_scaling_factor: float = 8.0
    max_position_embeddings: int = 4096


def check_positions(config: PositionFields) -> None:
    """See that there is such an embedding, and that rotation finds pairs of channels."""
    kind = config.position_embedding_type
    require(
        kind in POSITION_EMBEDDINGS,
        f"position embedding type {kind!r} is unknown; one of {', '.join(POSITION_EMBEDDINGS)}",
    )
    factor = config.rope_scaling_factor
    require(math.isfinite(factor) and factor >= 1, f"--rope-scaling-factor {factor} must be 1 or more")
    require(
        not config.use_rope_scaling or kind == "rope",
        f"--use-rope-scaling needs --position-embedding-type rope, not {kind}",
    )
    share = config.rotary_percent
    require(0 < share <= 1, f"--rotary-percent {share} must be more than 0 and at most 1: it is a share of a head")
    rotated = int(config.head_channels * share)
    require(
        kind != "rope" or (rotated > 0 and rotated % 2 == 0),
        f"--rotary-percent {share} of an attention head of {config.head_channels} rotates {rotated} channels; "
        "rotary embeddings need an even number",
    )
