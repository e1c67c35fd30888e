"""Rotary embedding of a model: the angles by which queries and keys are rotated."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.mcore import platform  # noqa: F401  # first: it puts the CPU stand-ins in place

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # isort: skip


def rotary_embedding(config: ModelConfig) -> RotaryEmbedding:
    """Return megatron-core's embedding, with wavelengths scaled as configured."""
    embedding = RotaryEmbedding(
        kv_channels=config.head_channels,
        rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        rope_scaling=config.use_rope_scaling,
        rope_scaling_factor=config.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    if config.yarn_rotary_scaling_factor is not None:
        embedding.inv_freq = stretched(embedding.inv_freq, config, config.yarn_rotary_scaling_factor)
    return embedding


def stretched(frequencies: Tensor, config: ModelConfig, factor: float) -> Tensor:
    """Return frequencies [n/2] scaled by YaRN (arXiv 2309.00071, section 3.2).

    A pair of channels that turns at least `yarn_beta_fast` times within the original length keeps its frequency; that
    of a pair that turns at most `yarn_beta_slow` times is divided by `factor`; between them both are blended.
    """
    pairs = len(frequencies)
    fast, slow = (_pair(config, pairs, turns) for turns in (config.yarn_beta_fast, config.yarn_beta_slow))
    if config.yarn_correction_range_round_to_int:
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, 2 * pairs - 1)
    length = last - first or 0.001
    share = ((torch.arange(pairs, dtype=torch.float32) - first) / length).clamp(0, 1)  # weight of the divided frequency
    return frequencies / factor * share + frequencies * (1 - share)


def _pair(config: ModelConfig, pairs: int, turns: float) -> float:
    """Return the pair of channels with `turns` turns in the original length; frequencies are base ** (-i / pairs)."""
    wavelength = config.yarn_original_max_position_embeddings / turns
    return pairs * math.log(wavelength / (2 * math.pi)) / math.log(config.rotary_base)
