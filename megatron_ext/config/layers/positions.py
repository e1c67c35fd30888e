"""Position embeddings of layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.checks import bounded, require
from megatron_ext.config.layers.attention import AttentionFields

LEARNED_POSITIONS = "learned_absolute"
POSITION_EMBEDDINGS = ("none", "rope", LEARNED_POSITIONS)


@dataclass(frozen=True)
class PositionFields(AttentionFields):
    """Fields of position embeddings, which rotate attention heads or are added to the token embeddings."""

    position_embedding_type: str = "none"
    rotary_base: int = bounded(10000, most=2**53)
    rotary_percent: float = 1.0
    use_rope_scaling: bool = False  # of long wavelengths, as in Llama 3.1
    rope_scaling_factor: float = 8.0
    # YaRN: wavelengths with many turns within the original length stay, those with few turns are stretched.
    yarn_rotary_scaling_factor: float | None = None  # stretch factor; default: no YaRN
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0  # turns at and above which a wavelength stays
    yarn_beta_slow: float = 1.0  # turns up to which it is stretched by the full factor
    yarn_mscale: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    yarn_correction_range_round_to_int: bool = True  # both ends of the range in between, in channel pairs
    max_position_embeddings: int = 4096

    @property
    def rotary_magnitude(self) -> float:
        """Additional factor of rotated queries and keys (YaRN, arXiv 2309.00071, section 3.4)."""
        factor = self.yarn_rotary_scaling_factor
        if factor is None or factor <= 1:
            return 1.0
        numerator, denominator = (
            0.1 * scale * math.log(factor) + 1.0 for scale in (self.yarn_mscale, self.yarn_mscale_all_dim)
        )
        return numerator / denominator if denominator else math.nan


def check_positions(config: PositionFields) -> None:
    """Require a known embedding, and an even number of rotated channels."""
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
    if config.yarn_rotary_scaling_factor is not None:
        _check_yarn(config, config.yarn_rotary_scaling_factor)


def _check_yarn(config: PositionFields, factor: float) -> None:
    given = f"yarn_rotary_scaling_factor {factor}"
    require(math.isfinite(factor) and factor >= 1, f"{given} must be 1 or more")
    require(
        config.position_embedding_type == "rope" and not config.use_rope_scaling,
        f"{given} needs --position-embedding-type rope, without --use-rope-scaling",
    )
    require(config.rotary_base > 1, f"{given} needs a --rotary-base of more than 1")
    fast, slow = config.yarn_beta_fast, config.yarn_beta_slow
    require(
        math.isfinite(fast) and 0 < slow <= fast,
        f"{given} with yarn_beta_fast {fast} and yarn_beta_slow {slow}: the first must not be below the second, and "
        "both above zero",
    )
    magnitude = config.rotary_magnitude
    require(
        math.isfinite(magnitude) and magnitude > 0,
        f"{given} with yarn_mscale {config.yarn_mscale} and yarn_mscale_all_dim {config.yarn_mscale_all_dim} "
        f"multiplies queries and keys by {magnitude}, which must be more than zero",
    )
