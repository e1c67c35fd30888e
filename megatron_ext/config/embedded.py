"""Embedded model, shipped with the package, and detection of flags that describe another model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.checks import flag_of
from megatron_ext.config.model import ModelConfig

EMBEDDED_MODEL_DIR = Path(__file__).parents[1] / "models" / "embedded_model"
_LONGEST_SHOWN = 60  # characters
# Fields that may have any value with the shipped weights.
_HARMLESS = frozenset(("max_position_embeddings", "mamba_chunk_size", "spec"))


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


def differences(model: ModelConfig, overrides: FieldValues) -> dict[str, object]:
    """Return the fields of `overrides` that differ from `model`, each with the value in `model`.

    A value that equals the field of `model`, or its effective value, is not a difference.
    """
    resolved = model.resolved()
    return {
        name: resolved[name]
        for name, value in overrides.items()
        if name not in _HARMLESS and value not in (getattr(model, name), resolved[name])
    }


def with_harmless(model: ModelConfig, overrides: FieldValues) -> ModelConfig:
    """Return `model` with the overrides that do not affect its weights; the others must be equal to its fields."""
    return dataclasses.replace(model, **{name: value for name, value in overrides.items() if name in _HARMLESS})


def as_flag(name: str, value: object, saved: object) -> str:
    """Format a field of `differences` as a command-line flag, with the model's own value."""
    if isinstance(value, bool):
        return flag_of(name) if value else flag_of(f"no_{name}")
    return f"{flag_of(name)} {_shown(value)} (not {_shown(saved)})"


def _shown(value: object) -> str:
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def check_flags(overrides: FieldValues) -> None:
    """Check model flags that are given without a checkpoint, before any loading.

    Raises:
        ConfigError: The flags describe neither the embedded model nor another one that can be built.
    """
    if differences(EMBEDDED_CONFIG, overrides):
        ModelConfig(**overrides)
    else:
        with_harmless(EMBEDDED_CONFIG, overrides)
