"""Differences between a model and flags that describe one, such as the embedded model that the package ships."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.layers import is_attention
from megatron_ext.config.model import ModelConfig
from megatron_ext.config.model_fields import LEARNED_POSITIONS, ModelFields
from megatron_ext.config.options import flag_of

# Fields that may have any value with the same weights, except for the first if positions are learned.
HARMLESS = frozenset(("max_position_embeddings", "mamba_chunk_size", "spec"))
_LONGEST_SHOWN = 60  # characters
_POSITIONS = "max_position_embeddings"
# The stored layout of the weights decides over these; multi-token prediction drafts, and changes no logit.
_BY_LAYOUT = frozenset(("num_layers", "group_query_attention", "vocab_size"))
_ROTARY = ("rotary_", "rope_", "use_rope", "yarn_")
_KINDS: Mapping[str, tuple[str, ...]] = {
    "mamba2": ("mamba_",),
    "mamba1": ("mamba_",),
    "gated_delta_net": ("linear_",),
    "short_conv": ("short_conv_",),
}


def differences(model: ModelFields, overrides: FieldValues) -> dict[str, object]:
    """Return the fields of `overrides` that differ from `model`, each with the value in `model`.

    A value that equals the field of `model`, or its effective value, is not a difference.
    """
    resolved = model.resolved()
    return {
        name: resolved[name]
        for name, value in overrides.items()
        if name not in HARMLESS and value not in (getattr(model, name), resolved[name])
    }


def logit_differences(model: ModelFields, overrides: FieldValues) -> dict[str, object]:
    """Return the differences that change a logit: without fields that no layer of the resulting model uses.

    This is the only list of what a checkpoint and flags must agree on. Fields of the layout of the stored weights are
    left out if another field says the same.
    """
    found = differences(model, overrides)
    changed = ModelFields(**{**model.to_dict(), **overrides})
    positions = overrides.get(_POSITIONS, model.max_position_embeddings)
    if changed.position_embedding_type == LEARNED_POSITIONS and positions != model.max_position_embeddings:
        found[_POSITIONS] = model.max_position_embeddings
    unused = ("mtp_", *_unused_prefixes(changed))
    return {name: value for name, value in found.items() if name not in _BY_LAYOUT and not name.startswith(unused)}


def _unused_prefixes(model: ModelFields) -> tuple[str, ...]:
    """Return prefixes of fields that are without effect in a model."""
    used = _KINDS.get(model.recurrent_layer, ()) if model.is_hybrid else ()
    unused = {prefix for prefixes in _KINDS.values() for prefix in prefixes} - set(used)
    if model.position_embedding_type != "rope" or not any(map(is_attention, model.hybrid_override_pattern)):
        unused.update(_ROTARY)
    if not model.use_rope_scaling:
        unused.add("rope_scaling_factor")
    if not model.is_moe:
        unused.add("moe_")
    return tuple(unused)


def as_flag(name: str, value: object, saved: object) -> str:
    """Format a field of `differences` as a command-line flag, with the model's own value."""
    if isinstance(value, bool):
        typed, other = (flag_of(name), flag_of(f"no_{name}"))[:: 1 if value else -1]
        return f"{typed} (not {other})"
    return f"{flag_of(name)} {_shown(value)} (not {_shown(saved)})"


def _shown(value: object) -> str:
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


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


def with_runtime_overrides(model: ModelConfig, overrides: FieldValues) -> ModelConfig:
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
        with_runtime_overrides(EMBEDDED_CONFIG, overrides)
