"""Embedded model, shipped with the package, and detection of flags that describe another model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.differences import HARMLESS, differences
from megatron_ext.config.model import ModelConfig

EMBEDDED_MODEL_DIR = Path(__file__).parents[1] / "models" / "embedded_model"


EMBEDDED_CONFIG = ModelConfig(  # a copy of its config file, so that flags are checked before anything is loaded
    hidden_size=192,
    mamba_state_dim=64,
    mamba_chunk_size=64,
    mamba_head_dim=32,
    mamba_num_heads=12,
    mamba_num_groups=2,
    ffn_hidden_size=768,
    squared_relu=True,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=48,
    hybrid_override_pattern="M-M*M-M-",
    vocab_size=4096,
    mtp_num_layers=1,
    mtp_use_repeated_layer=True,
    mtp_hybrid_override_pattern="*",
)


def with_harmless(model: ModelConfig, overrides: FieldValues) -> ModelConfig:
    """Return `model` with the overrides that do not affect its weights; the others must be equal to its fields."""
    return dataclasses.replace(model, **{name: value for name, value in overrides.items() if name in HARMLESS})


def check_flags(overrides: FieldValues) -> None:
    """Check model flags that are given without a checkpoint, before any loading.

    Raises:
        ConfigError: The flags describe neither the embedded model nor another one that can be built.
    """
    if differences(EMBEDDED_CONFIG, overrides):
        ModelConfig(**overrides)
    else:
        with_harmless(EMBEDDED_CONFIG, overrides)
