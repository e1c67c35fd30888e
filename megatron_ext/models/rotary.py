"""The angles that a model rotates queries and keys by."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.mcore import platform  # noqa: F401  # first: it puts the CPU stand-ins in place

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # isort: skip


def rotary_embedding(config: ModelConfig) -> RotaryEmbedding:
    """megatron-core's embedding, with wavelengths stretched as the configuration says."""
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
    """Frequencies [n/2] as YaRN has them (arXiv 2309.00071, section 3.2).

    A pair of channels that turns `yarn_beta_fast` times within the original length, or more often, keeps its frequency;
    of one that turns `yarn_beta_slow` times or less it is divided by `factor`; between them it is a mixture of both.
    """
    pairs = len(frequencies)
    fast, slow = (_pair(config, pairs, turns) for turns in (config.yarn_beta_fast, config.yarn_beta_slow))
    if config.yarn_correction_range_round_to_int:
        fast, slow = math.floor(fast), math.ceil(slow)
    first, last = max(fast, 0), min(slow, 2 * pairs - 1)
    length = last - first or 0.001
    share = ((torch.arange(pairs, dtype=torch.float32) - first) / length).clamp(0, 1)  # of what is stretched
    return frequencies / factor * share + frequencies * (1 - share)


def _pair(config: ModelConfig, pairs: int, turns: float) -> float:
    """Which pair of channels turns so often within the original length; frequencies are base ** (-i / pairs)."""
    wavelength = config.yarn_original_max_position_embeddings / turns
    return pairs * math.log(wavelength / (2 * math.pi)) / math.log(config.rotary_base)
